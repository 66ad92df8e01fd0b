"""What the launchers of the projections share."""

from typing import Any

import numpy as np
from torch import Tensor

from exactmoe.formats.rows import Rows
from exactmoe.kernels.cpu.project import BLOCK_ROWS
from exactmoe.ops.cpu.prepare import CpuWeight

SCALE_GROUP = 128
DENSE_SEGMENT = 4096
_NO_WEIGHTS = np.empty(0, np.float32)


def geometry(
    weight: CpuWeight, scaled: bool, dense: bool = False
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """int64 [3] of kernels/cpu/dot.py: columns, elements of a chain, bytes between token scales."""
    columns = weight.weight.columns
    chain = SCALE_GROUP if scaled else DENSE_SEGMENT if dense else columns
    return np.array([columns, chain, 4 if scaled else 0], np.int64)


def pieces(weight: CpuWeight, num_slots: int) -> int:
    """The most pieces of work that this many slots can make."""
    blocks = -(-weight.weight.rows // BLOCK_ROWS)
    return blocks * min(num_slots, weight.weight.num_experts)


def scales_or_none(rows: Rows) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Scales float32 [T, K // 128], or [T, 0]."""
    if rows.scales is None:
        return np.empty((rows.values.shape[0], 0), np.float32)
    return rows.scales.numpy()


def weights_or_none(weights: Tensor | None) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Weights float32 [S], or [0]."""
    return _NO_WEIGHTS if weights is None else weights.view(-1).numpy()
