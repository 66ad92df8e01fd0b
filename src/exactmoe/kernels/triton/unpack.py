"""Operands of the matrix units: codes and block scales of a weight tile to bfloat16, exactly.

A tile is M rows by K columns; the low nibble of a byte is the column before its high nibble's (the
k order is part of the bits).

FP4: with the sign at bit 15 and the three magnitude bits at 8..6, a bfloat16 is code x 2^-126,
subnormals included. One bfloat16 multiply by scale x 2^118 (NVFP4) gives code x scale x 2^-8, and
by 2^(n - p + 126) (MXFP4) code x 2^(n - p): both exact. `apply_factor` in project.py undoes the
2^-8.
"""

import triton
import triton.language as tl

from exactmoe.kernels.triton.functions import INTERPRETED

# A block scale byte e4m3, moved to bits 26..20 of a float32, is scale x 2^-120; scale x 2^118 is
# two factors away, because 2^238 is no float32.
_HALFWAY_TO_SCALE = tl.constexpr(2.0**119)
_E4M3_UNIT = tl.constexpr(2.0**120)
_BF16_NAN = tl.constexpr(0x7FC0)
# The biased exponent of a bfloat16 that stands for 2^126: the factor of a block with exponent p.
_LARGEST_FACTOR = tl.constexpr(253)
# Two codes of a byte to a word of two bfloat16: the low nibble times 2^6 and 2^12 puts its
# magnitude and its sign in place, the high nibble times 2^18 and 2^24.
_MAGNITUDES, _MAGNITUDE_BITS = tl.constexpr(0x00040040), tl.constexpr(0x01C001C0)
_SIGNS, _SIGN_BITS = tl.constexpr(0x01001000), tl.constexpr(-0x7FFF8000)


@triton.jit
def _times(bits, factor):
    """Exact product of bfloat16 bits int16 and a float32 factor that is a bfloat16."""
    if INTERPRETED:  # which multiplies bfloat16 as integers and loses its subnormals
        values = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        product = (values * factor).to(tl.bfloat16)
    else:
        product = bits.to(tl.bfloat16, bitcast=True) * tl.cast(factor, tl.bfloat16)
    return product


@triton.jit
def in_k_order(operand, PIN: tl.constexpr):
    """The operand as it is, but Triton cannot see what it was made of (PIN: mma.sync).

    Where it sees codes of 4 or 8 bits, it gives a lane 8 or 4 columns in a row, and one step of 16
    multiplies columns from all over a block of 64.
    """
    if PIN:
        operand = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [operand], tl.bfloat16, is_pure=False, pack=2
        )
    return operand


@triton.jit
def e4m3_operand(codes, NAN: tl.constexpr):
    """bfloat16 values of e4m3 bytes uint8, exact. NAN: 0x7F and 0xFF occur, and are NaN."""
    code = codes.to(tl.int16)
    bits = ((code & 0x80) << 8) | ((code & 0x7F) << 4)
    if NAN:
        bits = tl.where((code & 0x7F) == 0x7F, _BF16_NAN, bits)
    return _times(bits, _E4M3_UNIT)


@triton.jit
def _block_factor(scale, exponent, FORMAT: tl.constexpr):
    """Float32 factor of a block: scale x 2^118 (NVFP4), 2^(n - p + 126) (MXFP4).

    `exponent` is p + 127 of the rows. The clamps change blocks of zeros only, whose zeros must not
    meet an Inf.
    """
    byte = scale.to(tl.int32)
    if FORMAT == "nvfp4":
        value = (byte << 20).to(tl.float32, bitcast=True)
        factor = value * _HALFWAY_TO_SCALE * _HALFWAY_TO_SCALE
    else:
        biased = tl.minimum(tl.maximum(byte - exponent + _LARGEST_FACTOR, 0), _LARGEST_FACTOR)
        factor = (biased << 23).to(tl.float32, bitcast=True)
    return factor


@triton.jit
def fp4_operand(codes, scales, exponent, FORMAT: tl.constexpr, BLOCK: tl.constexpr):
    """codes uint8 [M, K / 2], scales uint8 [M, K / BLOCK], exponent [M, 1] -> bfloat16 [M, K]."""
    M: tl.constexpr = codes.shape[0]
    BYTES: tl.constexpr = codes.shape[1]
    HALF: tl.constexpr = BLOCK // 2
    byte = codes.to(tl.int32).reshape(M, BYTES // HALF, HALF)
    pair = (byte * _MAGNITUDES) & _MAGNITUDE_BITS | (byte * _SIGNS) & _SIGN_BITS
    halves = tl.join(pair.to(tl.int16), (pair >> 16).to(tl.int16))
    factor = _block_factor(scales, exponent, FORMAT).expand_dims(2).expand_dims(3)
    return _times(halves, factor).reshape(M, 2 * BYTES)
