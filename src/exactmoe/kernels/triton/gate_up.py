"""gate_up: the first two projections of an expert's slots and SwiGLU between them, one kernel.

A tile has 2 x ROWS real rows: rows [0, M / 2) are of gate, [M / 2, M) the same rows of up, so one
matrix instruction serves both. x bfloat16 [T, H], or (`a8`) e4m3 codes uint8 with scales float32
[T, H / 128]; h [S, I] bfloat16 bits (`a16`) or float32 (`a8`, times the routing weight) at the
slot's place.
"""

import triton
import triton.language as tl

from exactmoe.kernels.triton.functions import canonical, round_bf16, swiglu32
from exactmoe.kernels.triton.project import apply_factor, project, weight_rows
from exactmoe.kernels.triton.work import find_tile


@triton.jit
def _pair_rows(gate, up, expert, row, is_up, FORMAT: tl.constexpr):
    """weight_rows of a tile that holds rows of both projections."""
    gate_rows = weight_rows(gate, expert, row, FORMAT)
    up_rows = weight_rows(up, expert, row, FORMAT)
    return (
        tl.where(is_up, up_rows[0], gate_rows[0]),
        tl.where(is_up, up_rows[1], gate_rows[1]),
        tl.where(is_up, up_rows[2], gate_rows[2]),
    )


@triton.jit
def gate_up_tile(
    gate,
    up,
    expert,
    block,
    tokens,
    token_mask,
    limit,
    rows,
    COLUMNS: tl.constexpr,
    SEGMENT: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALED: tl.constexpr,
    DIVIDE_GATE: tl.constexpr,
    DIVIDE_UP: tl.constexpr,
    CLAMP: tl.constexpr,
    PIN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """(float32 [M / 2, N] of rows block x ROWS on, these rows, and which of them are real)."""
    HALF: tl.constexpr = BLOCK_M // 2
    index = tl.arange(0, BLOCK_M)
    row = block * ROWS + index % HALF
    row_mask = (index % HALF < ROWS) & (row < rows)
    acc = project(
        _pair_rows(gate, up, expert, row, index >= HALF, FORMAT), row_mask, tokens, token_mask,
        COLUMNS, SEGMENT, FORMAT, SCALED, PIN, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    g, u = tl.split(acc.reshape(2, HALF, BLOCK_N).permute(1, 2, 0))
    g = apply_factor(g, gate, expert, FORMAT, DIVIDE_GATE)
    u = apply_factor(u, up, expert, FORMAT, DIVIDE_UP)
    index = tl.arange(0, HALF)
    row = block * ROWS + index
    return swiglu32(g, u, limit, CLAMP), row, (index < ROWS) & (row < rows)


@triton.jit
def gate_up(
    x,
    gate,
    up,
    routes,
    weights,
    h,
    limit,
    num_experts,
    top_k,
    rows,
    COLUMNS: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALED: tl.constexpr,
    DIVIDE_GATE: tl.constexpr,
    DIVIDE_UP: tl.constexpr,
    CLAMP: tl.constexpr,
    BY_SLOT: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PIN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """x (values, their row stride, scales, theirs), routes (offsets, slots), weights float32 [S], h
    (values, row stride). Grid: token tiles x row blocks.
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
    token = slot // top_k
    tokens = (x[0] + token * x[1], x[2] + token * x[3])
    result, row, row_mask = gate_up_tile(
        gate, up, expert, block, tokens, token_mask, limit, rows, COLUMNS, COLUMNS,
        FORMAT, SCALED, DIVIDE_GATE, DIVIDE_UP, CLAMP, PIN, ROWS, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    pointers = h[0] + slot[None, :] * h[1] + row[:, None]
    mask = row_mask[:, None] & token_mask[None, :]
    if SCALED:
        weight = tl.load(weights + slot, mask=token_mask, other=0)
        tl.store(pointers, canonical(result * weight[None, :]), mask=mask)
    else:
        tl.store(pointers, round_bf16(result), mask=mask)
