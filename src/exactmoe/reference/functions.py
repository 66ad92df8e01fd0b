"""The fixed functions of contract section 1: every operation is written out, so no library decides
a bit.

In f32: fma, exp, silu. In f64: exp and log1p for the router's scores. Torch is used for +, -, x, /
and sqrt only.
"""

import torch
from torch import Tensor

F32_NAN_BITS = 0x7FC00000

_LOG2_E = 1.4426950408889634
_LN2_HIGH32, _LN2_LOW32 = 0.693359375, -2.12194440e-4
_EXP32_COEFFICIENTS = (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0)
_LN2_HIGH64, _LN2_LOW64 = 0.6931471803691238, 1.9082149292705877e-10
_EXP64_TERMS = 13
_LOG1P64_LAST = 25


def f32(value: float) -> Tensor:
    """A float64 number rounded once to float32, as a 0-d tensor."""
    return torch.tensor(value, dtype=torch.float64, device="cpu").float()


def fma32(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a x b + c with one rounding to float32.

    The product of two float32 is exact in float64. The sum is rounded to odd there, so the second
    rounding is right.
    """
    product = a.double() * b.double()
    addend = c.double()
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)  # TwoSum: total + error is exact
    bits = total.view(torch.int64)
    magnitude_too_small = (error > 0) == (total > 0)
    odd = torch.where(magnitude_too_small, bits, bits - 1) | 1
    inexact = torch.isfinite(total) & torch.isfinite(error) & (error != 0) & (bits & 1 == 0)
    return torch.where(inexact, odd, bits).view(torch.float64).float()


def exp32(x: Tensor) -> Tensor:
    """e^x in float32 (at most 0.92 ulp); x is clamped to [-104, 89], NaN stays NaN."""
    clamped = x.clamp(-104.0, 89.0)
    n = torch.round(clamped * f32(_LOG2_E))
    r = fma32(n, -f32(_LN2_HIGH32), clamped)
    r = fma32(n, -f32(_LN2_LOW32), r)
    p = f32(_EXP32_COEFFICIENTS[0]).expand_as(r)
    for coefficient in _EXP32_COEFFICIENTS[1:]:
        p = fma32(p, r, f32(coefficient).expand_as(r))
    half = torch.floor(n / 2)
    return (p * _power32(half)) * _power32(n - half)


def _power32(exponent: Tensor) -> Tensor:
    """2^exponent in float32 for whole exponents of normal size; NaN is read as 0 (p carries the
    NaN).
    """
    return ((torch.nan_to_num(exponent).int() + 127) << 23).view(torch.float32)


def silu32(g: Tensor) -> Tensor:
    """g / (1 + e^-g) in float32: one add, one division (at most 2.4 ulp; silu(20) = 20 and silu(32)
    = 32).
    """
    return g / (1.0 + exp32(-g))


def exp64(x: Tensor) -> Tensor:
    """e^x in float64 for x <= 0."""
    n = torch.round(x * _LOG2_E)
    r = (x - n * _LN2_HIGH64) - n * _LN2_LOW64
    coefficients = [1.0]
    for k in range(1, _EXP64_TERMS + 1):
        coefficients.append(coefficients[-1] / k)
    p = torch.full_like(r, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        p = p * r + coefficient
    exponent = torch.nan_to_num(n).clamp(-1000, 1000).long()
    return p * ((exponent + 1023) << 52).view(torch.float64)


def log1p64(e: Tensor) -> Tensor:
    """log(1 + e) in float64 for 0 <= e <= 1: 2 atanh(e / (2 + e)) as a series."""
    z = e / (2.0 + e)
    square = z * z
    p = torch.full_like(z, 1.0 / _LOG1P64_LAST)
    for k in range(_LOG1P64_LAST - 2, 0, -2):
        p = p * square + 1.0 / k
    return 2.0 * z * p


def _exp_of_minus_abs(x: Tensor) -> Tensor:
    return exp64(-x.abs().clamp(max=700))


def sigmoid_score(logit: Tensor) -> Tensor:
    """1 / (1 + e^-l): float32 logits to float32 scores, computed in float64 and rounded once."""
    wide = logit.double()
    e = _exp_of_minus_abs(wide)
    return torch.where(wide >= 0, 1.0 / (1.0 + e), e / (1.0 + e)).float()


def sqrt_softplus_score(logit: Tensor) -> Tensor:
    """sqrt(log(1 + e^l)): float32 logits to float32 scores, in float64 and rounded once."""
    wide = logit.double()
    return torch.sqrt(wide.clamp(min=0) + log1p64(_exp_of_minus_abs(wide))).float()


def canonical(values: Tensor) -> Tensor:
    """Float32 with every NaN as the one quiet NaN 0x7FC00000."""
    bits = values.view(torch.int32)
    return torch.where(values.isnan(), torch.full_like(bits, F32_NAN_BITS), bits).view(
        torch.float32
    )


def to_bf16(values: Tensor) -> Tensor:
    """Float32 rounded once to bfloat16 (nearest even), every NaN as 0x7FC0."""
    bits = values.view(torch.int32).long() & 0xFFFFFFFF
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded = torch.where(values.isnan(), torch.full_like(rounded, F32_NAN_BITS >> 16), rounded)
    return rounded.to(torch.int32).to(torch.int16).view(torch.bfloat16)


def swiglu32(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    """silu(min(g, L)) x clamp(u, -L, L) in float32; no clamp where L is None. NaN is propagated."""
    if limit is not None:
        gate = gate.clamp(max=limit)
        up = up.clamp(-limit, limit)
    return silu32(gate) * up
