"""One routed expert: gate and up, SwiGLU, down (contract sections 2 to 4)."""

from torch import Tensor

from exactmoe.config import Numerics
from exactmoe.formats import PackedWeight, apply_global_scale, operand
from exactmoe.formats.rows import Rows
from exactmoe.formats.scales import decode_e4m3
from exactmoe.reference.dot import dot, dot_blocks, dot_scaled
from exactmoe.reference.functions import canonical, swiglu32, to_bf16
from exactmoe.reference.quantize import quantize


def as_rows(values: Tensor, numerics: Numerics) -> Rows:
    """Activations [T, K] as the dots of a class read them: rounded to bf16 (`a16`), or quantised to
    e4m3 (`a8`).
    """
    if numerics.activation == "a16":
        return Rows(to_bf16(values.float()).float(), None)
    codes, scales = quantize(values)
    return Rows(decode_e4m3(codes), scales)


def project(weight: PackedWeight, expert: int, rows: Rows) -> Tensor:
    """One projection of one expert: rows [T, K] -> float32 [T, N], global scale applied.

    `a16`: one chain. `a8` (rows with scales), and FP8 blocks: one chain per 128.
    """
    w = operand(weight, expert)
    if weight.format == "fp8":
        assert weight.scales is not None and rows.scales is None  # the layer refuses it in `a8`
        accumulator = dot_blocks(w, rows.values, weight.scales[expert], segment=weight.columns)
    elif rows.scales is None:
        accumulator = dot(w, rows.values)
    else:
        accumulator = dot_scaled(w, rows.values, rows.scales)
    return apply_global_scale(weight, expert, accumulator)


def gate_up(
    rows: Rows,
    gate: PackedWeight,
    up: PackedWeight,
    expert: int,
    limit: float | None,
    weights: Tensor | None,
) -> Tensor:
    """rows [T, H] -> h float32 [T, I]. `a16` (weights None): rounded to bf16. `a8`: multiplied by
    the weights [T].
    """
    h = swiglu32(project(gate, expert, rows), project(up, expert, rows), limit)
    if weights is None:
        return to_bf16(h).float()
    return canonical(h * weights[:, None])


def down(h: Rows, weight: PackedWeight, expert: int, numerics: Numerics) -> Tensor:
    """h [T, I] -> slots float32 [T, H], rounded to bf16 unless numerics.slot is "f32"."""
    result = project(weight, expert, h)
    return to_bf16(result).float() if numerics.slot == "bf16" else canonical(result)


def expert_slots(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    projections: tuple[PackedWeight, PackedWeight, PackedWeight],
    limit: float | None,
    numerics: Numerics,
) -> Tensor:
    """All slots of a call: x bfloat16 [T, H], ids [T, K], weights float32 [T, K] -> slots float32
    [T, K, H].

    Absent slots (id < 0 or id >= E) are left at zero; the combine never reads them.
    """
    gate, up, down_weight = projections
    slots = weights.new_zeros(*expert_ids.shape, down_weight.rows)
    for token in range(expert_ids.shape[0]):
        rows = as_rows(x[token : token + 1], numerics)
        for k in range(expert_ids.shape[1]):
            expert = int(expert_ids[token, k])
            if not 0 <= expert < gate.num_experts:
                continue
            weight = weights[token, k : k + 1] if numerics.activation == "a8" else None
            h = gate_up(rows, gate, up, expert, limit, weight)
            slots[token, k] = down(as_rows(h, numerics), down_weight, expert, numerics)[0]
    return slots
