"""One projection of a dense part by plain loops over its segments."""

import numpy as np
import torch
from torch import Tensor

from chains import block_chains, chain
from exactmoe import PackedWeight
from exactmoe.formats import operand


def scaled(weight: PackedWeight, totals: np.ndarray) -> np.ndarray:
    """The global scale of NVFP4, or 2^p of MXFP4."""
    if weight.global_scale is not None:
        scale = np.float32(weight.global_scale[0])
        return totals * scale if weight.global_scale_op == "multiply" else totals / scale
    if weight.format == "mxfp4":
        assert weight.scales is not None
        return totals * np.float32(2.0 ** (int(weight.scales.max()) - 127))
    return totals


def projected(weight: PackedWeight, rows: Tensor, segment: int) -> Tensor:
    """One projection [T, N] by plain loops over k, cut every `segment` of k."""
    values, x = operand(weight, 0).numpy(), rows.float().numpy()
    totals = np.zeros((len(x), weight.rows), np.float32)
    for start in range(0, weight.columns, segment):
        part = slice(start, start + segment)
        w, x_part = values[None, :, part], x[:, None, part]
        if weight.format == "fp8":
            totals = totals + block_chains(w, x_part, _scales(weight, start, w.shape[-1]))
        else:
            totals = totals + chain(w, x_part)
    return torch.from_numpy(scaled(weight, totals))


def _scales(weight: PackedWeight, start: int, columns: int) -> np.ndarray:
    """Of each row, for the blocks of `columns` from `start` [N, blocks]."""
    assert weight.scales is not None
    blocks = slice(start // 128, -(-(start + columns) // 128))
    return weight.scales[0, :, blocks].repeat_interleave(128, 0)[: weight.rows].numpy()
