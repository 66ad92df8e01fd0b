"""quantize: activations of class `a8` (contract section 3), a group of 128 values a row of a tile.

Only integers, one product and one exact power of two decide a code, so every architecture gives
the same bytes; e4m3 itself is needed by none.
"""

import triton
import triton.language as tl

from exactmoe.kernels.triton.early import in_turn
from exactmoe.kernels.triton.functions import to_float32

GROUP = tl.constexpr(128)
_INF = tl.constexpr(0x7F800000)
# A float32 from 2^-6 on: its top 12 bits are an e4m3 code plus (127 - 7) x 8.
_LEAST_NORMAL, _REBIAS = tl.constexpr(0x3C800000), tl.constexpr(120 << 3)
# Adding 2^14 rounds to a multiple of 2^-9, the step of e4m3 below 2^-6.
_SUBNORMAL, _SUBNORMAL_BITS = tl.constexpr(2.0**14), tl.constexpr(0x46800000)
_NAN = tl.constexpr(0x7F)


@triton.jit
def encode_e4m3(values):
    """Finite float32, magnitude at most 464 -> e4m3 codes int32: nearest even, a zero is 0x00.

    No group has more: x / scale passes 448 by the rounding of amax x f32(1/448) only.
    """
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - _REBIAS
    shifted = magnitude.to(tl.float32, bitcast=True) + _SUBNORMAL
    code = tl.where(
        magnitude < _LEAST_NORMAL, shifted.to(tl.int32, bitcast=True) - _SUBNORMAL_BITS, normal
    )
    return tl.where(code == 0, 0, code | ((bits >> 24) & 0x80))


@triton.jit
def quantize(
    values,  # float32 or bfloat16 [G, 128]
    codes,  # uint8 [G, 128]
    scales,  # float32 [G]
    num_groups,
    BLOCK: tl.constexpr,  # groups of a program
    PDL: tl.constexpr,
):
    """Grid: (ceil(G / BLOCK),)."""
    in_turn(PDL)
    group = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    known = group < num_groups
    place = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = to_float32(tl.load(values + place, mask=known[:, None], other=0.0))
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    finite = largest < _INF
    amax = tl.where(finite, largest, 0).to(tl.float32, bitcast=True)
    step = tl.maximum(amax, 1e-4) * (1 / 448)
    bits = step.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)  # biased by 127, 105 to 247
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    code = encode_e4m3(x * inverse[:, None])
    code = tl.where(finite[:, None], code, _NAN)
    tl.store(codes + place, code.to(tl.uint8), mask=known[:, None])
    tl.store(scales + group, tl.where(finite, scale, 1.0), mask=known)
