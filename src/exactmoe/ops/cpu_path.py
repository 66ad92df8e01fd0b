"""The CPU path: launchers of the numba kernels."""

from torch import Tensor

from exactmoe.config import Numerics
from exactmoe.ops.cards import TorchCards
from exactmoe.ops.cpu.combine import combine
from exactmoe.ops.cpu.dense_linear import dense_linear
from exactmoe.ops.cpu.dense_mlp import dense_gate_up, dense_mlp
from exactmoe.ops.cpu.down import down
from exactmoe.ops.cpu.finish import finish
from exactmoe.ops.cpu.gate_up import gate_up
from exactmoe.ops.cpu.prepare import prepare
from exactmoe.ops.cpu.quantize import quantize
from exactmoe.ops.cpu.route_table import route_table
from exactmoe.ops.cpu.router import router as cpu_router
from exactmoe.ops.path import DECODED, RouterWeights


class CpuPath:
    """Compiled loops, threaded; see ops/path.py for the shapes."""

    name = "cpu"
    storage = DECODED
    prepare = staticmethod(prepare)
    quantize = staticmethod(quantize)
    route_table = staticmethod(route_table)
    gate_up = staticmethod(gate_up)
    down = staticmethod(down)
    combine = staticmethod(combine)
    dense_mlp = staticmethod(dense_mlp)
    dense_gate_up = staticmethod(dense_gate_up)
    dense_linear = staticmethod(dense_linear)
    finish = staticmethod(finish)

    @property
    def cards(self) -> TorchCards:
        return TorchCards(self.combine)

    def router(
        self,
        x: Tensor,
        router: RouterWeights,
        token_ids: Tensor | None,
        numerics: Numerics,
        logits: Tensor,
        routed: tuple[Tensor, Tensor],
        parts: Tensor | None,
    ) -> None:
        cpu_router(x, router, token_ids, numerics, logits, routed)
