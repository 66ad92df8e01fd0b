"""Kernels that apply one function of the matrix ops' device code to arrays. They are not decorated:
a test takes them interpreted or compiled.
"""

import triton.language as tl

from exactmoe.kernels.triton.unpack import e4m3_operand, fp4_operand
from exactmoe.kernels.triton.work import find_tile


def fp4(
    codes, scales, exponents, y, FORMAT: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr
):
    """16 rows of y int16 (bits) [M, K] = fp4_operand of codes uint8 [M, K / 2]."""
    row = tl.program_id(0) * 16 + tl.arange(0, 16)
    half: tl.constexpr = COLUMNS // 2
    blocks: tl.constexpr = COLUMNS // BLOCK
    code = tl.load(codes + row[:, None] * half + tl.arange(0, half)[None, :])
    scale = tl.load(scales + row[:, None] * blocks + tl.arange(0, blocks)[None, :])
    exponent = tl.load(exponents + row)[:, None]
    value = fp4_operand(code, scale, exponent, FORMAT, BLOCK)
    place = row[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(y + place, value.to(tl.int16, bitcast=True))


def e4m3(codes, y, NAN: tl.constexpr, COUNT: tl.constexpr):
    """y int16 (bits) [COUNT] = e4m3_operand of codes uint8."""
    place = tl.arange(0, COUNT)
    value = e4m3_operand(tl.load(codes + place), NAN)
    tl.store(y + place, value.to(tl.int16, bitcast=True))


def tiles(
    offsets,
    y,
    num_experts,
    BY_SLOT: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Row program_id of y int32 [programs, 3] = find_tile."""
    index = tl.program_id(0)
    expert, first, end = find_tile(offsets, index, num_experts, BY_SLOT, BLOCK_E, BLOCK_N)
    tl.store(y + 3 * index, expert.to(tl.int32))
    tl.store(y + 3 * index + 1, first)
    tl.store(y + 3 * index + 2, end)
