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
    dense_gate_up(x, (gate, up), swiglu_limit, h)
    (routes, no_scales), chains = _all_rows(x.shape[0]), geometry(down, False, dense=True)
    given = (h.numpy(), no_scales, down.arrays, routes, chains, False, out.numpy())
    launch(down_kernels.down, given, pieces(down, x.shape[0]), out.numel() * h.shape[1])


def dense_gate_up(
    x: Tensor, gate_up: tuple[CpuWeight, CpuWeight], swiglu_limit: float | None, h: Tensor
) -> None:
    """The first half: x float32 [T, H] (values of bf16) -> h float32 [T, I], values of bf16."""
    (gate, up), (routes, no_scales) = gate_up, _all_rows(x.shape[0])
    limit = np.float32(np.inf if swiglu_limit is None else swiglu_limit)
    chains = geometry(gate, False, dense=True)
    given = (x.numpy(), no_scales, gate.arrays, up.arrays, routes, chains, weights_or_none(None))
    work = 2 * h.numel() * x.shape[1]
    launch(gate_up_kernels.gate_up, (*given, limit, True, h.numpy()), pieces(gate, len(x)), work)


def _all_rows(num_tokens: int) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
    """One expert serves every token; its rows have no scales."""
    routes = (np.array([0, num_tokens]), np.arange(num_tokens))
    return routes, np.empty((num_tokens, 0), np.float32)
