"""Operands of the matrix units: codes and block scales of a weight tile to bfloat16, exactly.

A tile is BLOCK_M rows by BLOCK_K of k; column j of the operand is k + j, so the low nibble of a
byte comes before its high nibble (the k order is part of the bits).

FP4: with the sign at bit 31 and the three magnitude bits at 24..22, a float32 word is code x 2^-126
(subnormals included). One multiply by scale x 2^118 (NVFP4) gives code x scale x 2^-8, and by
2^(n - p + 126) (MXFP4) code x 2^(n - p); both are bfloat16 numbers. `apply_factor` in project.py
undoes the 2^-8.
"""

import triton
import triton.language as tl

# A block scale byte e4m3, moved to bits 26..20 of a float32, is scale x 2^-120; scale x 2^118 is
# two factors away, because 2^238 is no float32.
_HALFWAY_TO_SCALE = tl.constexpr(2.0**119)
_E4M3_UNIT = tl.constexpr(2.0**120)
# The biased exponent of a float32 that stands for 2^126: the largest of a zero's block.
_LARGEST_FACTOR = tl.constexpr(253)


@triton.jit
def _code_value(nibble):
    """Float32 code x 2^-126 of four bits int32 at bits 3..0 (others are ignored)."""
    bits = ((nibble & 8) << 28) | ((nibble & 7) << 22)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def e4m3_value(byte):
    """Float32 value of an e4m3 byte (uint8), exact; 0x7F and 0xFF are NaN."""
    code = byte.to(tl.int32)
    bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
    value = bits.to(tl.float32, bitcast=True) * _E4M3_UNIT
    return tl.where((code & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def _block_factor(scale, exponent, FORMAT: tl.constexpr):
    """Float32 factor of a block: scale x 2^118 (NVFP4), 2^(n - p + 126) (MXFP4).

    `exponent` is p + 127 of the tile's rows. Only blocks of zeros are clamped: no NaN comes from
    0 x Inf.
    """
    byte = scale.to(tl.int32)
    if FORMAT == "nvfp4":
        value = (byte << 20).to(tl.float32, bitcast=True)
        value = value * _HALFWAY_TO_SCALE * _HALFWAY_TO_SCALE
    else:
        biased = byte - exponent + _LARGEST_FACTOR
        biased = tl.minimum(tl.maximum(biased, 0), _LARGEST_FACTOR)
        value = (biased << 23).to(tl.float32, bitcast=True)
    return value


@triton.jit
def fp4_operand(codes, scales, exponent, FORMAT: tl.constexpr, BLOCK: tl.constexpr):
    """codes uint8 [M, K / 2], scales uint8 [M, K / BLOCK], exponent int32 [M, 1] -> bfloat16 [M, K]."""
    M: tl.constexpr = codes.shape[0]
    BYTES: tl.constexpr = codes.shape[1]
    HALF: tl.constexpr = BLOCK // 2
    bytes = codes.to(tl.int32).reshape(M, BYTES // HALF, HALF)
    factor = _block_factor(scales, exponent, FORMAT).expand_dims(2)
    low = (_code_value(bytes) * factor).to(tl.bfloat16)
    high = (_code_value(bytes >> 4) * factor).to(tl.bfloat16)
    return tl.join(low, high).reshape(M, 2 * BYTES)
