"""The CUDA path: run-time compiled kernels on sm_90 for the routed experts and for dense MLPs that
they take (ops/cuda/dense_mlp.py), and the portable ones for all else.
Same bits as the Triton path there, as far as both run on the bf16 units.
"""

import torch
from torch import Tensor

from exactmoe.config import Numerics
from exactmoe.errors import Unsupported
from exactmoe.formats import PackedWeight
from exactmoe.formats.rows import Rows
from exactmoe.ops.cuda import dense_mlp, experts
from exactmoe.ops.cuda.prepare import CudaWeight, prepare
from exactmoe.ops.path import PACKED, PACKED_A8, ExpertSettings
from exactmoe.ops.triton.prepare import TritonWeight
from exactmoe.ops.triton_path import TritonPath
from exactmoe.runtime.routes import RouteTable

# A launch of one phase needs no more of the numerics than its class.
_A16, _A8 = Numerics(), Numerics.preset("a8")


class CudaPath(TritonPath):
    """Routed experts NVFP4 and MXFP4 in class `a16`; see ops/path.py for the shapes."""

    name = "cuda"
    storage = PACKED
    prepare = staticmethod(prepare)  # type: ignore[assignment]

    def __init__(self) -> None:
        # Of each stream: the route table that its last gate_up read. The next down of these routes
        # may start while that gate_up ends.
        self._begun: dict[tuple[int, int], RouteTable] = {}

    def route_table(  # type: ignore[override]
        self, expert_ids: Tensor, num_experts: int, routes: RouteTable
    ) -> None:
        self._begun.pop(_stream(expert_ids), None)
        TritonPath.route_table(expert_ids, num_experts, routes)

    def gate_up(  # type: ignore[override]
        self,
        rows: Rows,
        gate_up: tuple[CudaWeight, CudaWeight],
        routes: RouteTable,
        weights: Tensor | None,
        swiglu_limit: float | None,
        h: Tensor,
    ) -> None:
        if weights is not None or rows.scales is not None:
            raise Unsupported("this path computes class a16; allowed for a8: a path of a8")
        given = experts.Experts((*gate_up, None), routes, swiglu_limit, _A16)
        experts.gate_up(given, rows, Rows(h, None))
        self._begun[_stream(h)] = routes

    def down(  # type: ignore[override]
        self, h: Rows, down: CudaWeight, routes: RouteTable, numerics: Numerics, slots: Tensor
    ) -> None:
        if h.scales is not None:
            raise Unsupported("this path computes class a16; allowed for a8: a path of a8")
        given = experts.Experts((None, None, down), routes, None, numerics)
        experts.down(given, h, slots, self._may_start(slots, routes))

    def gate_up_down(
        self,
        rows: Rows,
        weights: tuple[CudaWeight, CudaWeight, CudaWeight],
        routes: RouteTable,
        settings: ExpertSettings,
        h: Rows,
        slots: Tensor,
    ) -> None:
        """Both in one launch: see ops/path.py."""
        limit, numerics, routing = settings
        given = experts.Experts(weights, routes, limit, numerics, routing)
        experts.gate_up_down(given, rows, h, slots)

    def dense_mlp(
        self,
        x: Tensor,
        weights: tuple[TritonWeight, TritonWeight, TritonWeight],
        swiglu_limit: float | None,
        h: Tensor,
        out: Tensor,
    ) -> None:
        if dense_mlp.takes(weights):
            dense_mlp.dense_mlp(x, weights, swiglu_limit, h, out)
        else:  # layer.explain() and the log say why
            super().dense_mlp(x, weights, swiglu_limit, h, out)

    def dense_gate_up(
        self,
        x: Tensor,
        gate_up: tuple[TritonWeight, TritonWeight],
        swiglu_limit: float | None,
        h: Tensor,
    ) -> None:
        if dense_mlp.takes(gate_up):
            dense_mlp.dense_gate_up(x, gate_up, swiglu_limit, h)
        else:
            super().dense_gate_up(x, gate_up, swiglu_limit, h)

    def _may_start(self, slots: Tensor, routes: RouteTable) -> bool:
        return self._begun.pop(_stream(slots), None) is routes


class CudaA8Path(CudaPath):
    """The same in class `a8`, each expert and projection on the units that its bytes allow."""

    name = "cuda_a8"
    storage = PACKED_A8["auto"]

    def gate_up_quantized(
        self,
        rows: Rows,
        weights: tuple[CudaWeight, CudaWeight, CudaWeight],
        routes: RouteTable,
        routing: Tensor,
        swiglu_limit: float | None,
        h: Rows,
    ) -> None:
        """gate_up, then quantize: see ops/path.py."""
        given = experts.Experts(weights, routes, swiglu_limit, _A8, routing)
        experts.gate_up(given, rows, h)
        self._begun[_stream(routing)] = routes

    def down(  # type: ignore[override]
        self, h: Rows, down: CudaWeight, routes: RouteTable, numerics: Numerics, slots: Tensor
    ) -> None:
        given = experts.Experts((None, None, down), routes, None, numerics)
        experts.down(given, h, slots, self._may_start(slots, routes))


class CudaA8Bf16Path(CudaA8Path):
    """Class `a8`, all on the bf16 units."""

    name = "cuda_a8_bf16"
    storage = PACKED_A8["bf16"]


class CudaA8Fp8Path(CudaA8Path):
    """Class `a8`, all on the fp8 units."""

    name = "cuda_a8_fp8"
    storage = PACKED_A8["fp8"]

    @staticmethod
    def prepare(  # type: ignore[override]
        weight: PackedWeight, fp8: Tensor | None = None
    ) -> CudaWeight:
        """As ops/cuda/prepare.py.

        Raises:
            Unsupported: an expert would lose bits there.
        """
        if fp8 is None or not bool(fp8.all()):
            expert = 0 if fp8 is None else int((~fp8).nonzero()[0])
            raise Unsupported(
                f"numerics.units is 'fp8', and expert {expert} is not exact on the fp8 units "
                "(contract section 3); allowed: auto, bf16"
            )
        return prepare(weight, fp8)


def _stream(tensor: Tensor) -> tuple[int, int]:
    device = tensor.device.index
    return device, torch.cuda.current_stream(device).cuda_stream
