"""gate_up: the first two projections of the routed experts, and SwiGLU between them."""

import numpy as np
from torch import Tensor

from exactmoe.formats.rows import Rows
from exactmoe.kernels.cpu import gate_up as kernels
from exactmoe.ops.cpu.prepare import CpuWeight
from exactmoe.ops.cpu.project import geometry, pieces, scales_or_none, weights_or_none
from exactmoe.ops.cpu.threads import launch
from exactmoe.runtime.routes import RouteTable


def gate_up(
    rows: Rows,
    gate_up: tuple[CpuWeight, CpuWeight],
    routes: RouteTable,
    weights: Tensor | None,
    swiglu_limit: float | None,
    h: Tensor,
) -> None:
    """rows [T, H] -> h float32 [S, I] in place: `a16` values of bf16; `a8` x weights [T, K]."""
    gate, up = gate_up
    scaled = rows.scales is not None
    arguments = (
        rows.values.numpy(),
        scales_or_none(rows),
        gate.arrays,
        up.arrays,
        (routes.offsets.numpy(), routes.slots.numpy()),
        geometry(gate, scaled),
        weights_or_none(weights),
        np.float32(np.inf if swiglu_limit is None else swiglu_limit),
        not scaled,
        h.numpy(),
    )
    work = 2 * h.numel() * rows.values.shape[1]
    launch(kernels.gate_up, arguments, pieces(gate, h.shape[0]), work)
