"""dense_linear: a linear layer of packed weights."""

import numpy as np
from torch import Tensor

from exactmoe.kernels.cpu import down as kernels
from exactmoe.ops.cpu.prepare import CpuWeight
from exactmoe.ops.cpu.project import geometry, pieces
from exactmoe.ops.cpu.threads import launch


def dense_linear(x: Tensor, weight: CpuWeight, out: Tensor) -> None:
    """x float32 [T, G, K] (values of bf16) -> out float32 [T, G, N] before its rounding.

    The kernel of the routed experts: group g is an expert that serves slot (t, g) of every token,
    with segments of 4096 of k.
    """
    num_tokens, groups, columns = x.shape
    slots = np.arange(num_tokens * groups).reshape(num_tokens, groups).T.reshape(-1).copy()
    routes = (np.arange(groups + 1) * num_tokens, slots)
    values, results = x.reshape(-1, columns).numpy(), out.view(-1, out.shape[-1]).numpy()
    no_scales = np.empty((values.shape[0], 0), np.float32)
    chains = geometry(weight, False, dense=True)
    arguments = (values, no_scales, weight.arrays, routes, chains, False, results)
    launch(kernels.down, arguments, pieces(weight, len(values)), results.size * columns)
