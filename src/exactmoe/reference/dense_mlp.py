"""Dense parts (dense FFN, shared expert, a linear layer): bf16 activations in both classes,
segments of 4096 (contract sections 4, 7).
"""

import torch
from torch import Tensor

from exactmoe.formats import PackedWeight, apply_global_scale, operand
from exactmoe.reference.dot import DENSE_SEGMENT, dot_blocks, dot_dense
from exactmoe.reference.functions import canonical, swiglu32, to_bf16


def dense_mlp(
    x: Tensor, gate: PackedWeight, up: PackedWeight, down: PackedWeight, limit: float | None
) -> Tensor:
    """x bfloat16 [T, H], one-expert weights -> float32 [T, H], before any rounding to an output
    type.
    """
    return canonical(_project(down, dense_gate_up(x, gate, up, limit)))


def dense_gate_up(x: Tensor, gate: PackedWeight, up: PackedWeight, limit: float | None) -> Tensor:
    """x bfloat16 [T, H] -> h [T, I], float32 values of bf16: what `dense_mlp` gives to its down."""
    return to_bf16(swiglu32(_project(gate, x), _project(up, x), limit))


def dense_linear(x: Tensor, weight: PackedWeight) -> Tensor:
    """One linear layer of G groups, each with inputs and outputs of its own: x bfloat16 [T, G, K],
    weight of G "experts" [G, N, K] -> float32 [T, G, N], before any rounding to an output type.
    """
    groups = [_project(weight, x[:, group], group) for group in range(weight.num_experts)]
    return canonical(torch.stack(groups, 1))


def _project(weight: PackedWeight, x: Tensor, expert: int = 0) -> Tensor:
    w, rows = operand(weight, expert), x.float()
    if weight.format == "fp8":
        assert weight.scales is not None
        return dot_blocks(w, rows, weight.scales[expert], segment=DENSE_SEGMENT)
    return apply_global_scale(weight, expert, dot_dense(w, rows))
