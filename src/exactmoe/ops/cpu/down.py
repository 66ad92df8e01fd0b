"""down: the last projection of the routed experts."""

from torch import Tensor

from exactmoe.config import Numerics
from exactmoe.formats.rows import Rows
from exactmoe.kernels.cpu import down as kernels
from exactmoe.ops.cpu.prepare import CpuWeight
from exactmoe.ops.cpu.project import geometry, pieces, scales_or_none
from exactmoe.ops.cpu.threads import launch
from exactmoe.runtime.routes import RouteTable


def down(h: Rows, down: CpuWeight, routes: RouteTable, numerics: Numerics, slots: Tensor) -> None:
    """h [S, I] -> slots float32 [S, H] at their places, values of bf16 where numerics.slot says."""
    arguments = (
        h.values.numpy(),
        scales_or_none(h),
        down.arrays,
        (routes.offsets.numpy(), routes.slots.numpy()),
        geometry(down, h.scales is not None),
        numerics.slot == "bf16",
        slots.numpy(),
    )
    launch(kernels.down, arguments, pieces(down, slots.shape[0]), slots.numel() * h.values.shape[1])
