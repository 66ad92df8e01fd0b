"""down: the last projection of an expert's slots, each result at its slot's original place.

h bfloat16 [S, I], or (`a8`) e4m3 codes uint8 with scales float32 [S, I / 128]; out [S, H] bfloat16
bits or float32.
"""

import triton
import triton.language as tl

from exactmoe.kernels.triton.functions import canonical, round_bf16
from exactmoe.kernels.triton.project import apply_factor, project, weight_rows
from exactmoe.kernels.triton.work import find_tile


@triton.jit
def down_tile(
    weight,
    expert,
    block,
    tokens,
    token_mask,
    rows,
    COLUMNS: tl.constexpr,
    SEGMENT: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALED: tl.constexpr,
    DIVIDE: tl.constexpr,
    PIN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """(float32 [M, N] of rows block x ROWS on, these rows, and which of them are real)."""
    index = tl.arange(0, BLOCK_M)
    row = block * ROWS + index
    row_mask = (index < ROWS) & (row < rows)
    acc = project(
        weight_rows(weight, expert, row, FORMAT), row_mask, tokens, token_mask,
        COLUMNS, SEGMENT, FORMAT, SCALED, PIN, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    return apply_factor(acc, weight, expert, FORMAT, DIVIDE), row, row_mask


@triton.jit
def down(
    h,
    weight,
    routes,
    out,
    num_experts,
    rows,
    COLUMNS: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALED: tl.constexpr,
    DIVIDE: tl.constexpr,
    ROUND: tl.constexpr,
    BY_SLOT: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PIN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """h (values, their row stride, scales, theirs), routes (offsets, slots), out (values, row
    stride). ROUND: to bfloat16. Grid: token tiles x row blocks.
    """
    offsets, slots = routes
    row_blocks = tl.cdiv(rows, ROWS)
    block = tl.program_id(0) % row_blocks
    expert, first, end = find_tile(
        offsets, tl.program_id(0) // row_blocks, num_experts, BY_SLOT, BLOCK_E, BLOCK_N
    )
    if first >= end:
        return
    place = first + tl.arange(0, BLOCK_N)
    token_mask = place < end
    slot = tl.load(slots + place, mask=token_mask, other=0).to(tl.int64)
    tokens = (h[0] + slot * h[1], h[2] + slot * h[3])
    result, row, row_mask = down_tile(
        weight, expert, block, tokens, token_mask, rows, COLUMNS, COLUMNS,
        FORMAT, SCALED, DIVIDE, PIN, ROWS, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    pointers = out[0] + slot[None, :] * out[1] + row[:, None]
    mask = row_mask[:, None] & token_mask[None, :]
    if ROUND:
        tl.store(pointers, round_bf16(result), mask=mask)
    else:
        tl.store(pointers, canonical(result), mask=mask)
