"""The fixed functions of contract section 1 on blocks, twins of reference/functions.py.

Every launch sets enable_fp_fusion=False: a fused multiply-add stands only where `fma32` is written.
f32: exp32, silu32, swiglu32. f64: exp64, log1p64 and the router's scores. Whole numbers are found
by adding 1.5 x 2^23 (1.5 x 2^52 in f64), which rounds to nearest even; the sum's low bits are the
integer.
"""

import triton
import triton.language as tl

# The interpreter's fma rounds twice; there it is made of float64 steps.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

NAN_BITS = tl.constexpr(0x7FC00000)
_LOG2_E = tl.constexpr(1.4426950408889634)
_MINUS_LN2_HIGH32, _MINUS_LN2_LOW32 = tl.constexpr(-0.693359375), tl.constexpr(2.12194440e-4)
_EXP32 = tl.constexpr((1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0))
_WHOLE32, _WHOLE32_BITS = tl.constexpr(1.5 * 2.0**23), tl.constexpr(0x4B400000)

_LN2_HIGH64, _LN2_LOW64 = tl.constexpr(0.6931471803691238), tl.constexpr(1.9082149292705877e-10)
_WHOLE64, _WHOLE64_BITS = tl.constexpr(1.5 * 2.0**52), tl.constexpr(0x4338000000000000)
_LOG1P64 = tl.constexpr(tuple(1.0 / k for k in range(25, 0, -2)))


def _inverse_factorials(last: int) -> tuple[float, ...]:
    terms = [1.0]
    for k in range(1, last + 1):
        terms.append(terms[-1] / k)
    return tuple(reversed(terms))


_EXP64 = tl.constexpr(_inverse_factorials(13))


@triton.jit
def to_float32(values):
    """Float32 of float32 or bfloat16, exact; the interpreter's own cast is wrong for subnormals."""
    if INTERPRETED and values.dtype == tl.bfloat16:
        bits = values.to(tl.int16, bitcast=True).to(tl.int32) << 16
        return bits.to(tl.float32, bitcast=True)
    return values.to(tl.float32)


@triton.jit
def canonical(values):
    """Float32 with every NaN as 0x7FC00000."""
    bits = values.to(tl.int32, bitcast=True)
    return tl.where(values != values, NAN_BITS, bits).to(tl.float32, bitcast=True)


@triton.jit
def round_bf16(values):
    """Float32 rounded once to bfloat16 (nearest even), as int16 bits; every NaN is 0x7FC0."""
    bits = values.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(values != values, NAN_BITS >> 16, rounded).to(tl.int16)


@triton.jit
def through_bf16(values):
    """Float32 rounded to the nearest bfloat16, as float32."""
    return (round_bf16(values).to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def fma32(a, b, c):
    """Float32 blocks a x b + c, rounded once."""
    if INTERPRETED:
        product = a.to(tl.float64) * b.to(tl.float64)
        addend = c.to(tl.float64)
        total = product + addend
        back = total - product
        error = (product - (total - back)) + (addend - back)
        bits = total.to(tl.int64, bitcast=True)
        odd = tl.where((error > 0) == (total > 0), bits, bits - 1) | 1
        finite = (tl.abs(total) < float("inf")) & (tl.abs(error) < float("inf"))
        inexact = finite & (error != 0) & (bits & 1 == 0)
        return tl.where(inexact, odd, bits).to(tl.float64, bitcast=True).to(tl.float32)
    return tl.math.fma(a, b, c)


@triton.jit
def exp32(x):
    """e^x of float32 blocks; x is clamped to [-104, 89], NaN stays NaN."""
    x = tl.maximum(x, -104.0, propagate_nan=tl.PropagateNan.ALL)
    x = tl.minimum(x, 89.0, propagate_nan=tl.PropagateNan.ALL)
    shifted = x * _LOG2_E + _WHOLE32
    n = shifted - _WHOLE32
    r = fma32(n, tl.full(x.shape, _MINUS_LN2_HIGH32, tl.float32), x)
    r = fma32(n, tl.full(x.shape, _MINUS_LN2_LOW32, tl.float32), r)
    p = tl.full(x.shape, _EXP32[0], tl.float32)
    for i in tl.static_range(1, 8):
        p = fma32(p, r, tl.full(x.shape, _EXP32[i], tl.float32))
    whole = shifted.to(tl.int32, bitcast=True) - _WHOLE32_BITS
    half = whole >> 1
    p = p * ((half + 127) << 23).to(tl.float32, bitcast=True)
    return p * ((whole - half + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def silu32(g):
    """g / (1 + e^-g) of float32 blocks: one add, one division."""
    return tl.div_rn(g, 1.0 + exp32(-g))


@triton.jit
def swiglu32(gate, up, limit, CLAMP: tl.constexpr):
    """silu(min(gate, limit)) x clamp(up, -limit, limit) of float32 blocks; NaN is propagated."""
    if CLAMP:
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
    return silu32(gate) * up


@triton.jit
def exp64(x):
    """e^x of float64 blocks, -700 <= x <= 0."""
    shifted = x * _LOG2_E + _WHOLE64
    n = shifted - _WHOLE64
    r = (x - n * _LN2_HIGH64) - n * _LN2_LOW64
    p = tl.full(x.shape, _EXP64[0], tl.float64)
    for i in tl.static_range(1, 14):
        p = p * r + _EXP64[i]
    whole = tl.maximum(shifted.to(tl.int64, bitcast=True) - _WHOLE64_BITS, -1000)
    return p * ((whole + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def log1p64(e):
    """log(1 + e) of float64 blocks, 0 <= e <= 1."""
    z = e / (2.0 + e)
    square = z * z
    p = tl.full(e.shape, _LOG1P64[0], tl.float64)
    for i in tl.static_range(1, 13):
        p = p * square + _LOG1P64[i]
    return 2.0 * z * p


@triton.jit
def _exp_of_minus_abs(x):
    magnitude = tl.abs(x)
    return exp64(-tl.where(magnitude > 700.0, 700.0, magnitude))


@triton.jit
def router_score(logits, SIGMOID: tl.constexpr):
    """Scores of float32 logits, computed in float64 and rounded once to float32.

    Sigmoid: 1 / (1 + e^-l). Else the square root of softplus: sqrt(log(1 + e^l)).
    """
    wide = logits.to(tl.float64)
    e = _exp_of_minus_abs(wide)
    if SIGMOID:
        return (tl.where(wide >= 0.0, 1.0, e) / (1.0 + e)).to(tl.float32)
    positive = tl.where(wide < 0.0, 0.0, wide)
    return tl.sqrt(positive + log1p64(e)).to(tl.float32)
