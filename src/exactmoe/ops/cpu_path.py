"""The CPU path: launchers of the numba kernels."""

from exactmoe.ops.cpu.combine import combine
from exactmoe.ops.cpu.dense_mlp import dense_mlp
from exactmoe.ops.cpu.down import down
from exactmoe.ops.cpu.finish import finish
from exactmoe.ops.cpu.gate_up import gate_up
from exactmoe.ops.cpu.prepare import prepare
from exactmoe.ops.cpu.quantize import quantize
from exactmoe.ops.cpu.route_table import route_table
from exactmoe.ops.cpu.router import router


class CpuPath:
    """Compiled loops, threaded; see ops/path.py for the shapes."""

    name = "cpu"
    prepare = staticmethod(prepare)
    quantize = staticmethod(quantize)
    router = staticmethod(router)
    route_table = staticmethod(route_table)
    gate_up = staticmethod(gate_up)
    down = staticmethod(down)
    combine = staticmethod(combine)
    dense_mlp = staticmethod(dense_mlp)
    finish = staticmethod(finish)
