"""The fixed functions of contract section 1 for one value, twins of reference/functions.py."""

import numpy as np

from exactmoe.kernels.cpu.compile import device
from exactmoe.kernels.cpu.intrinsics import bits32, float32_of, float64_of, fma32

F32_NAN = np.uint32(0x7FC00000)
_LOG2_E32 = np.float32(1.4426950408889634)
_MINUS_LN2_HIGH32, _MINUS_LN2_LOW32 = np.float32(-0.693359375), np.float32(2.12194440e-4)
_C7, _C6, _C5, _C4 = (
    np.float32(1 / 5040),
    np.float32(1 / 720),
    np.float32(1 / 120),
    np.float32(1 / 24),
)
_C3, _C2, _ONE = np.float32(1 / 6), np.float32(1 / 2), np.float32(1.0)
_LOW32, _HIGH32, _ZERO = np.float32(-104.0), np.float32(89.0), np.float32(0.0)

_LOG2_E64, _LN2_HIGH64, _LN2_LOW64 = 1.4426950408889634, 0.6931471803691238, 1.9082149292705877e-10
_EXP64_TERMS, _LOG1P64_LAST = 13, 25


def _inverse_factorials() -> tuple[float, ...]:
    terms = [1.0]
    for k in range(1, _EXP64_TERMS + 1):
        terms.append(terms[-1] / k)
    return tuple(reversed(terms))


_EXP64 = _inverse_factorials()
_LOG1P64 = tuple(1.0 / k for k in range(_LOG1P64_LAST, 0, -2))


@device
def canonical(value):
    """A float32 with every NaN as 0x7FC00000."""
    return value if value == value else float32_of(F32_NAN)


@device
def bf16_bits(value):
    """The bits of a float32 rounded to bfloat16, nearest even, every NaN as 0x7FC0; uint32."""
    bits = bits32(value)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return rounded if value == value else np.uint32(0x7FC0)


@device
def round_bf16(value):
    """A float32 rounded to the nearest bfloat16, as float32."""
    return float32_of(np.uint32(bf16_bits(value) << np.uint32(16)))


@device
def _power32(exponent):
    whole = np.int32(exponent) if exponent == exponent else np.int32(0)
    return float32_of(np.uint32((whole + np.int32(127)) << np.int32(23)))


@device
def exp32(x):
    """e^x in float32; x is clamped to [-104, 89], NaN stays NaN."""
    clamped = _LOW32 if x < _LOW32 else (_HIGH32 if x > _HIGH32 else x)
    n = np.rint(clamped * _LOG2_E32)
    r = fma32(n, _MINUS_LN2_HIGH32, clamped)
    r = fma32(n, _MINUS_LN2_LOW32, r)
    p = fma32(_C7, r, _C6)
    p = fma32(p, r, _C5)
    p = fma32(p, r, _C4)
    p = fma32(p, r, _C3)
    p = fma32(p, r, _C2)
    p = fma32(p, r, _ONE)
    p = fma32(p, r, _ONE)
    half = np.floor(n * _C2)
    return (p * _power32(half)) * _power32(n - half)


@device
def swiglu32(gate, up, limit):
    """silu(min(gate, limit)) x clamp(up, -limit, limit); limit = inf: no clamp, and NaN is kept."""
    g = limit if gate > limit else gate
    u = limit if up > limit else (-limit if up < -limit else up)
    return g / (_ONE + exp32(-g)) * u


@device
def exp64(x):
    """e^x in float64 for x <= 0."""
    n = np.rint(x * _LOG2_E64)
    r = (x - n * _LN2_HIGH64) - n * _LN2_LOW64
    p = _EXP64[0]
    for k in range(1, _EXP64_TERMS + 1):
        p = p * r + _EXP64[k]
    whole = np.int64(min(max(n, -1000.0), 1000.0)) if n == n else np.int64(0)
    return p * float64_of((whole + np.int64(1023)) << np.int64(52))


@device
def log1p64(e):
    """log(1 + e) in float64 for 0 <= e <= 1."""
    z = e / (2.0 + e)
    square = z * z
    p = _LOG1P64[0]
    for k in range(1, (_LOG1P64_LAST + 1) // 2):
        p = p * square + _LOG1P64[k]
    return 2.0 * z * p


@device
def _exp_of_minus_abs(x):
    magnitude = abs(x)
    return exp64(-(700.0 if magnitude > 700.0 else magnitude))


@device
def sigmoid_score(logit):
    """1 / (1 + e^-logit) in float64, rounded once to float32."""
    wide = np.float64(logit)
    e = _exp_of_minus_abs(wide)
    return np.float32(1.0 / (1.0 + e) if wide >= 0.0 else e / (1.0 + e))


@device
def sqrt_softplus_score(logit):
    """sqrt(log(1 + e^logit)) in float64, rounded once to float32."""
    wide = np.float64(logit)
    positive = 0.0 if wide < 0.0 else wide
    return np.float32(np.sqrt(positive + log1p64(_exp_of_minus_abs(wide))))
