"""A tile of the CPU kernels, called by itself."""

import numpy as np
import torch
from torch import Tensor

from exactmoe.kernels.cpu import dot as kernels
from exactmoe.ops.cpu.prepare import CpuWeight


def addresses(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def run(
    weight: CpuWeight,
    x: Tensor,
    chain: int,
    scales: Tensor | None = None,
    format: str = "",
    fused: bool = False,
) -> Tensor:
    """The first 4 rows of expert 0 by the tokens of x: float32 [T, 4] before the epilogue."""
    tokens = len(x)
    codes, block_scales, table = (int(a) for a in weight.experts[0])
    layout = weight.layout
    rows = addresses(*(codes + r * int(layout[2]) for r in range(4)))
    row_scales = addresses(*(block_scales + r // int(layout[4]) * int(layout[3]) for r in range(4)))
    one = torch.ones(1)
    token_rows = addresses(*(row.data_ptr() for row in x))
    token_scales = addresses(
        *((one if scales is None else scales[t]).data_ptr() for t in range(tokens))
    )
    geometry = addresses(x.shape[1], chain, 0 if scales is None else 4)
    out = torch.full((tokens, 4), 7.0)
    arrays = (rows, row_scales, table, token_rows, token_scales, geometry, out.numpy())
    tile = kernels.tile(format or weight.weight.format, tokens, fused)
    tile.ctypes(*(a if isinstance(a, int) else a.ctypes.data for a in arrays))
    return out
