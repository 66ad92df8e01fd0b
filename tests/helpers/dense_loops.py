"""One projection of a dense part by plain loops over its segments."""

import numpy as np
import torch
from torch import Tensor

from chains import block_chains, chain
from exactmoe import PackedWeight
from exactmoe.formats import operand


def scaled(weight: PackedWeight, total: np.float32) -> np.float32:
    """The global scale of NVFP4, or 2^p of MXFP4."""
    if weight.global_scale is not None:
        scale = np.float32(weight.global_scale[0])
        return total * scale if weight.global_scale_op == "multiply" else total / scale
    if weight.format == "mxfp4":
        assert weight.scales is not None
        return total * np.float32(2.0 ** (int(weight.scales.max()) - 127))
    return total


def projected(weight: PackedWeight, rows: Tensor, segment: int) -> Tensor:
    """One projection [T, N] by plain loops, cut every `segment` of k."""
    values, x = operand(weight, 0).numpy(), rows.float().numpy()

    def one(token: int, row: int) -> np.float32:
        total = np.float32(0)
        for start in range(0, weight.columns, segment):
            part = slice(start, start + segment)
            if weight.format == "fp8":
                assert weight.scales is not None
                blocks = slice(start // 128, -(-min(start + segment, weight.columns) // 128))
                scales = weight.scales[0, row // 128, blocks].numpy()
                total = total + block_chains(values[row, part], x[token, part], scales)
            else:
                total = total + chain(values[row, part], x[token, part])
        return scaled(weight, total)

    return torch.tensor([[one(t, n) for n in range(weight.rows)] for t in range(len(x))])
