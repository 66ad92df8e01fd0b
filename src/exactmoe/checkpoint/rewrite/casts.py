"""From one format to another: exact where every scale allows it, proved; and the error elsewhere.

MXFP4 -> NVFP4: two blocks of 16 take the scale of one of 32, a power of two under a global scale
that is one too; E4M3 holds powers of two from 2^-9 to 2^8, so the exponents of an expert may span
17 binades. NVFP4 -> MXFP4: the scales must be powers of two, and equal in each pair of blocks.
Codes stay as they are, signed zeros too.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from exactmoe.errors import BitMismatch
from exactmoe.formats import BLOCK, PackedWeight, dequantize, exponent_range
from exactmoe.formats.packed import nonzero_blocks
from exactmoe.formats.scales import E8M0_BIAS, decode_e4m3, encode_e4m3, floor_log2, power_of_two

_E4M3_LOW, _E4M3_HIGH = -9, 8
# Rows decoded at a time in float64: a multiple of the rows of an FP8 block.
_ROWS = 512


def exact_cast(weight: PackedWeight, format: str) -> PackedWeight | None:
    """The same values in the other FP4 format, or None where its scales cannot hold them.

    Args:
        weight: one expert (E = 1), NVFP4 or MXFP4.
        format: "nvfp4" or "mxfp4", the other one.
    """
    assert weight.num_experts == 1
    if (weight.format, format) == ("mxfp4", "nvfp4"):
        return _to_nvfp4(weight)
    if (weight.format, format) == ("nvfp4", "mxfp4"):
        return _to_mxfp4(weight)
    return None


def _to_nvfp4(weight: PackedWeight) -> PackedWeight | None:
    assert weight.scales is not None
    low, high = (int(value[0]) for value in exponent_range(weight))
    # float32's smallest normal: a subnormal global scale would be lost where they are flushed.
    shift = max(high - _E4M3_HIGH, -126)
    if low - shift < _E4M3_LOW:
        return None
    exponents = weight.scales.int() - E8M0_BIAS - shift
    scales = encode_e4m3(power_of_two(exponents.clamp(_E4M3_LOW, _E4M3_HIGH)))
    # A block of zeros may have any exponent; it stays a block of zeros.
    scales = torch.where(nonzero_blocks(weight), scales, torch.zeros_like(scales))
    global_scale = power_of_two(torch.tensor([shift]))
    return PackedWeight("nvfp4", weight.codes, scales.repeat_interleave(2, -1), global_scale)


def _to_mxfp4(weight: PackedWeight) -> PackedWeight | None:
    assert weight.scales is not None and weight.global_scale is not None
    if weight.columns % BLOCK["mxfp4"]:
        return None
    mantissa, exponent = math.frexp(float(weight.global_scale[0]))
    counted, values = nonzero_blocks(weight), decode_e4m3(weight.scales)
    exponents = floor_log2(torch.where(values > 0, values, torch.ones_like(values)))
    powers = (power_of_two(exponents) == values) | ~counted
    if mantissa != 0.5 or not bool(powers.all()):
        return None
    exponents = exponents + (exponent - 1) * (1 if weight.global_scale_op == "multiply" else -1)
    pairs, used = exponents.unflatten(-1, (-1, 2)), counted.unflatten(-1, (-1, 2))
    high = torch.where(used, pairs, torch.full_like(pairs, -1000)).amax(-1)
    low = torch.where(used, pairs, torch.full_like(pairs, 1000)).amin(-1)
    empty = high < low
    if bool(((high != low) & ~empty).any()):
        return None
    high = torch.where(empty, torch.full_like(high, -E8M0_BIAS), high)
    if bool((high.abs() > E8M0_BIAS).any()):
        return None
    return PackedWeight("mxfp4", weight.codes, (high + E8M0_BIAS).to(torch.uint8))


def prove_equal(before: PackedWeight, after: PackedWeight, name: str) -> None:
    """Proves that two FP4 weights have the same values: the same codes, byte by byte, and over each
    block with a non-zero code the same step, which float64 holds exactly in both.

    Raises:
        BitMismatch: they differ; the cast is wrong.
    """
    same = _steps(before) == _steps(after)
    counted = nonzero_blocks(before).repeat_interleave(BLOCK[before.format] // 16, -1)
    if not torch.equal(before.codes, after.codes) or not bool((same | ~counted).all()):
        raise BitMismatch(f"{name}: the cast to {after.format} changed a value")


def _steps(weight: PackedWeight) -> Tensor:
    """Block scale x global scale, one for each 16 values: float64 [E, N, K // 16]."""
    assert weight.scales is not None
    if weight.format == "mxfp4":
        exponents = weight.scales.long() - E8M0_BIAS
        steps = torch.ldexp(torch.ones_like(exponents, dtype=torch.float64), exponents)
        return steps.repeat_interleave(2, -1)
    assert weight.global_scale is not None
    steps, scale = decode_e4m3(weight.scales).double(), weight.global_scale.double()
    scale = scale[:, None, None]
    return steps * scale if weight.global_scale_op == "multiply" else steps / scale


def sqnr(before: PackedWeight, after: PackedWeight) -> float | None:
    """10 log10(sum of w^2 / sum of (w - w')^2) in dB; None where no value changed.

    0 where all that was there is lost: so weights of zeros that stay zeros give None.
    """
    signal = noise = 0.0
    for old, new in zip(_decoded(before), _decoded(after), strict=True):
        signal += float(old.square().sum())
        noise += float((old - new).square().sum())
    return None if noise == 0 else 10 * math.log10(signal / noise)


def float_values(weight: PackedWeight) -> Tensor:
    """The values as a quantiser takes them, [1, N, K]: bf16 as it is, else float32."""
    if weight.scales is None:
        return weight.codes
    out = torch.empty((1, weight.rows, weight.columns), dtype=torch.float32)
    for number, values in enumerate(_decoded(weight)):
        out[:, number * _ROWS : (number + 1) * _ROWS] = values
    return out


def rows_of(weight: PackedWeight, start: int, stop: int) -> PackedWeight:
    """Some rows; of an FP8 weight from a multiple of 128 on."""
    per = BLOCK["fp8"] if weight.format == "fp8" else 1
    return PackedWeight(
        weight.format,
        weight.codes[:, start:stop],
        None if weight.scales is None else weight.scales[:, start // per : -(-stop // per)],
        weight.global_scale,
        weight.global_scale_op,
    )


def _decoded(weight: PackedWeight) -> Iterator[Tensor]:
    for start in range(0, weight.rows, _ROWS):
        yield dequantize(rows_of(weight, start, min(start + _ROWS, weight.rows)))


def joined(weights: list[PackedWeight]) -> PackedWeight | None:
    """Projections of one expert as one weight, rows after rows; None where scales forbid it."""
    first = weights[0]
    if len(weights) == 1:
        return first
    if any(w.format != first.format or w.columns != first.columns for w in weights):
        return None
    if first.global_scale is not None:
        same = all(
            w.global_scale_op == first.global_scale_op
            and w.global_scale is not None
            and torch.equal(w.global_scale, first.global_scale)
            for w in weights
        )
        if not same:
            return None
    if first.format == "fp8" and any(w.rows % BLOCK["fp8"] for w in weights):
        return None
    parts = [w.scales for w in weights if w.scales is not None]
    return PackedWeight(
        first.format,
        torch.cat([w.codes for w in weights], 1),
        torch.cat(parts, 1) if parts else None,
        first.global_scale,
        first.global_scale_op,
    )
