"""dense_mlp: dense FFN and shared expert."""

import numpy as np
from torch import Tensor

from exactmoe.kernels.cpu import down as down_kernels
from exactmoe.kernels.cpu import gate_up as gate_up_kernels
from exactmoe.ops.cpu.prepare import CpuWeight
from exactmoe.ops.cpu.project import geometry, pieces, weights_or_none
from exactmoe.ops.cpu.threads import launch


def dense_mlp(
    x: Tensor,
    weights: tuple[CpuWeight, CpuWeight, CpuWeight],
    swiglu_limit: float | None,
    h: Tensor,
    out: Tensor,
) -> None:
    """x float32 [T, H] (values of bf16) -> out float32 [T, H] before its rounding; h float32 [T,
    I] is scratch.

    The kernels of the routed experts, with one expert that serves every token, and segments of
    4096 of k.
    """
    gate, up, down = weights
    num_tokens = x.shape[0]
    routes = (np.array([0, num_tokens]), np.arange(num_tokens))
    no_scales = np.empty((num_tokens, 0), np.float32)
    limit = np.float32(np.inf if swiglu_limit is None else swiglu_limit)
    values, hidden = x.numpy(), h.numpy()
    chains = geometry(gate, False, dense=True)
    first = (values, no_scales, gate.arrays, up.arrays, routes, chains, weights_or_none(None))
    work = 2 * h.numel() * x.shape[1]
    launch(gate_up_kernels.gate_up, (*first, limit, True, hidden), pieces(gate, num_tokens), work)
    chains = geometry(down, False, dense=True)
    second = (hidden, no_scales, down.arrays, routes, chains, False, out.numpy())
    launch(down_kernels.down, second, pieces(down, num_tokens), out.numel() * h.shape[1])
