"""One routed expert for one token: gate and up, SwiGLU, down (contract sections 2 to 4)."""

import torch
from torch import Tensor

from exactmoe.config import Numerics
from exactmoe.formats import PackedWeight, apply_global_scale, operand
from exactmoe.formats.scales import decode_e4m3
from exactmoe.reference.dot import dot, dot_scaled
from exactmoe.reference.functions import canonical, swiglu32, to_bf16
from exactmoe.reference.quantize import quantize


def project(weight: PackedWeight, expert: int, x: Tensor, numerics: Numerics) -> Tensor:
    """One projection of one expert: x float32 or bfloat16 [T, K] -> float32 [T, N], global scale applied.

    `a16`: x as bf16, one chain. `a8`: x as e4m3 codes and scales, one chain per 128.
    """
    w = operand(weight, expert)
    if numerics.activation == "a16":
        accumulator = dot(w, to_bf16(x.float()).float())
    else:
        codes, scales = quantize(x)
        accumulator = dot_scaled(w, decode_e4m3(codes), scales)
    return apply_global_scale(weight, expert, accumulator)


def gate_up(
    x: Tensor,
    gate: PackedWeight,
    up: PackedWeight,
    expert: int,
    limit: float | None,
    numerics: Numerics,
    weight: Tensor | None = None,
) -> Tensor:
    """x bfloat16 [T, H] -> h [T, I]: `a16` bfloat16; `a8` float32, multiplied by the routing weight [T]."""
    h = swiglu32(project(gate, expert, x, numerics), project(up, expert, x, numerics), limit)
    if numerics.activation == "a16":
        return to_bf16(h)
    if weight is not None:
        h = h * weight[:, None]
    return canonical(h)


def down(h: Tensor, weight: PackedWeight, expert: int, numerics: Numerics) -> Tensor:
    """h [T, I] -> slots [T, H]: bfloat16, or float32 where numerics.slot says so."""
    result = project(weight, expert, h, numerics)
    return to_bf16(result) if numerics.slot == "bf16" else canonical(result)


def expert_slots(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    projections: tuple[PackedWeight, PackedWeight, PackedWeight],
    limit: float | None,
    numerics: Numerics,
) -> Tensor:
    """All slots of a call: x bfloat16 [T, H], ids [T, K], weights float32 [T, K] -> slots [T, K, H].

    Absent slots (id < 0 or id >= E) are left at zero; the combine never reads them.
    """
    gate, up, down_weight = projections
    slot_dtype = torch.bfloat16 if numerics.slot == "bf16" else torch.float32
    slots = torch.zeros(*expert_ids.shape, down_weight.rows, dtype=slot_dtype)
    for token in range(expert_ids.shape[0]):
        for k in range(expert_ids.shape[1]):
            expert = int(expert_ids[token, k])
            if not 0 <= expert < gate.num_experts:
                continue
            row = x[token : token + 1]
            h = gate_up(row, gate, up, expert, limit, numerics, weights[token, k : k + 1])
            slots[token, k] = down(h, down_weight, expert, numerics)[0]
    return slots
