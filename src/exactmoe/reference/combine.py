"""Combine: a token's slots to one row, in an order that neither the ids' order nor the placement
changes (section 5).
"""

import torch
from torch import Tensor

from exactmoe.reference.functions import canonical, to_bf16

GROUPS = 8


def combine(
    slots: Tensor, expert_ids: Tensor, weights: Tensor, num_experts: int, activation: str
) -> Tensor:
    """Slots float32 [T, K, H], ids [T, K], weights float32 [T, K] -> combined float32 [T, H].

    Group of an expert: (8 x e) div E. Within a group from +0, ascending id, equal ids ascending by
        the weight's bits as
    unsigned: `a16` s = s + weight x slot, `a8` s = s + slot. Groups: ((0+1)+(2+3))+((4+5)+(6+7)).
    """
    rows = []
    for token in range(expert_ids.shape[0]):
        bits = (weights[token].contiguous().view(torch.int32).long() & 0xFFFFFFFF).tolist()
        ids = expert_ids[token].tolist()
        present = [k for k in range(len(ids)) if 0 <= ids[k] < num_experts]
        groups = [slots.new_zeros(slots.shape[2]) for _ in range(GROUPS)]
        for k in sorted(present, key=lambda k: (ids[k], bits[k])):
            term = slots[token, k]
            if activation == "a16":
                term = weights[token, k] * term
            group = GROUPS * ids[k] // num_experts
            groups[group] = groups[group] + term
        while len(groups) > 1:
            groups = [left + right for left, right in zip(groups[0::2], groups[1::2], strict=True)]
        rows.append(groups[0])
    return torch.stack(rows) if rows else slots.new_zeros(0, slots.shape[2])


def finish(combined: Tensor, shared: Tensor | None, output: str) -> Tensor:
    """combined + shared (float32 [T, H] each) -> y, one rounding to the output type ("bf16" or
    "f32").
    """
    total = combined if shared is None else combined + shared
    return to_bf16(total) if output == "bf16" else canonical(total)
