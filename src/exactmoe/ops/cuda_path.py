"""The CUDA path: run-time compiled kernels for the routed experts on sm_90, and the portable ones
for all else. Same bits as the Triton path there.
"""

import torch
from torch import Tensor

from exactmoe.config import Numerics
from exactmoe.errors import Unsupported
from exactmoe.formats.rows import Rows
from exactmoe.ops.cuda import experts
from exactmoe.ops.cuda.prepare import CudaWeight, prepare
from exactmoe.ops.path import PACKED
from exactmoe.ops.triton_path import TritonPath
from exactmoe.runtime.routes import RouteTable


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
            raise Unsupported("the cuda path computes class a16; allowed for a8: backend triton")
        experts.gate_up(rows, gate_up, routes, swiglu_limit, h)
        self._begun[_stream(h)] = routes

    def down(  # type: ignore[override]
        self, h: Rows, down: CudaWeight, routes: RouteTable, numerics: Numerics, slots: Tensor
    ) -> None:
        if h.scales is not None:
            raise Unsupported("the cuda path computes class a16; allowed for a8: backend triton")
        early = self._begun.pop(_stream(slots), None) is routes
        experts.down(h, down, routes, numerics, slots, early)


def _stream(tensor: Tensor) -> tuple[int, int]:
    device = tensor.device.index
    return device, torch.cuda.current_stream(device).cuda_stream
