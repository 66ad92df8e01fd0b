"""combine: a token's slots, and its shared expert, to one row of y."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from exactmoe.config import Numerics
from exactmoe.kernels.cpu import combine as kernels
from exactmoe.ops.cpu.threads import launch


def combine(
    slots: Tensor,
    routed: tuple[Tensor, Tensor],
    num_experts: int,
    numerics: Numerics,
    shared: Tensor | None,
    y: Tensor,
) -> None:
    """slots [S, H], routed (expert_ids, weights) [T, K], shared [T, H] or None -> y [T, H]."""
    expert_ids, weights = routed
    none = np.empty((0, y.shape[1]), np.float32)
    arguments = (
        slots.numpy(),
        expert_ids.numpy(),
        weights.numpy(),
        num_experts,
        numerics.activation == "a16",
        none if shared is None else shared.numpy(),
        *outputs(y),
    )
    pieces = y.shape[0] * -(-y.shape[1] // kernels.BLOCK)
    launch(kernels.combine, arguments, pieces, slots.numel())


def outputs(y: Tensor) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """y as the pair that the kernels write: float32 and uint16, one of them without rows."""
    if y.dtype == torch.float32:
        return y.numpy(), np.empty((0, y.shape[1]), np.uint16)
    return np.empty((0, y.shape[1]), np.float32), y.view(torch.uint16).numpy()
