"""The Triton path: launchers of the portable GPU kernels."""

from torch import Tensor

from exactmoe.ops.path import DEVICE
from exactmoe.ops.triton.cards import TritonCards
from exactmoe.ops.triton.combine import combine
from exactmoe.ops.triton.dense_linear import dense_linear as run_dense_linear
from exactmoe.ops.triton.dense_mlp import dense_gate_up as run_dense_gate_up
from exactmoe.ops.triton.dense_mlp import dense_mlp as run_dense_mlp
from exactmoe.ops.triton.down import down
from exactmoe.ops.triton.finish import finish
from exactmoe.ops.triton.gate_up import gate_up
from exactmoe.ops.triton.prepare import TritonWeight, prepare
from exactmoe.ops.triton.quantize import quantize
from exactmoe.ops.triton.route_table import route_table
from exactmoe.ops.triton.router import router


class TritonPath:
    """Kernels compiled at their first call; see ops/path.py for the shapes."""

    name = "triton"
    storage = DEVICE
    cards = TritonCards()
    prepare = staticmethod(prepare)
    quantize = staticmethod(quantize)
    router = staticmethod(router)
    route_table = staticmethod(route_table)
    gate_up = staticmethod(gate_up)
    down = staticmethod(down)
    combine = staticmethod(combine)
    finish = staticmethod(finish)

    def dense_mlp(
        self,
        x: Tensor,
        weights: tuple[TritonWeight, TritonWeight, TritonWeight],
        swiglu_limit: float | None,
        h: Tensor,
        out: Tensor,
    ) -> None:
        run_dense_mlp(x, weights, swiglu_limit, h, out, self.name)

    def dense_gate_up(
        self,
        x: Tensor,
        gate_up: tuple[TritonWeight, TritonWeight],
        swiglu_limit: float | None,
        h: Tensor,
    ) -> None:
        run_dense_gate_up(x, gate_up, swiglu_limit, h, self.name)

    def dense_linear(self, x: Tensor, weight: TritonWeight, out: Tensor) -> None:
        run_dense_linear(x, weight, out, self.name)
