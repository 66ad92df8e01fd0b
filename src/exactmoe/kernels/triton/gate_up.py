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
def activate(
    acc,
    gate,
    up,
    expert,
    limit,
    FORMAT: tl.constexpr,
    DIVIDE_GATE: tl.constexpr,
    DIVIDE_UP: tl.constexpr,
    CLAMP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """acc [M, N] of gate and up rows -> silu(min(g, L)) x clamp(u, -L, L), float32 [M / 2, N]."""
    pairs = acc.reshape(2, BLOCK_M // 2, BLOCK_N).permute(1, 2, 0)
    g, u = tl.split(pairs)
    g = apply_factor(g, gate, expert, FORMAT, DIVIDE_GATE)
    u = apply_factor(u, up, expert, FORMAT, DIVIDE_UP)
    return swiglu32(g, u, limit, CLAMP)


@triton.jit
def pair_rows(gate, up, expert, row, is_up, FORMAT: tl.constexpr):
    """weight_rows of a tile that holds rows of both projections."""
    gate_rows = weight_rows(gate, expert, row, FORMAT)
    up_rows = weight_rows(up, expert, row, FORMAT)
    return (
        tl.where(is_up, up_rows[0], gate_rows[0]),
        tl.where(is_up, up_rows[1], gate_rows[1]),
        tl.where(is_up, up_rows[2], gate_rows[2]),
    )


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
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """x (values, their row stride, scales, theirs), routes (offsets, slots), h (values, row stride).

    Grid: (row blocks, token tiles).
    """
    offsets, slots = routes
    expert, first, end = find_tile(
        offsets, tl.program_id(1), num_experts, BY_SLOT, BLOCK_E, BLOCK_N
    )
    if first >= end:
        return
    place = first + tl.arange(0, BLOCK_N)
    token_mask = place < end
    slot = tl.load(slots + place, mask=token_mask, other=0).to(tl.int64)
    token = slot // top_k
    tokens = (x[0] + token * x[1], x[2] + token * x[3])

    HALF: tl.constexpr = BLOCK_M // 2
    index = tl.arange(0, BLOCK_M)
    row = tl.program_id(0) * ROWS + index % HALF
    row_mask = (index % HALF < ROWS) & (row < rows)
    both = pair_rows(gate, up, expert, row, index >= HALF, FORMAT)
    acc = project(
        both, row_mask, tokens, token_mask, COLUMNS,
        FORMAT, SCALED, COLUMNS, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    result = activate(
        acc, gate, up, expert, limit, FORMAT, DIVIDE_GATE, DIVIDE_UP, CLAMP, BLOCK_M, BLOCK_N
    )
    index = tl.arange(0, HALF)
    row = tl.program_id(0) * ROWS + index
    row_mask = (index < ROWS) & (row < rows)
    out = h[0] + slot[None, :] * h[1] + row[:, None]
    mask = row_mask[:, None] & token_mask[None, :]
    if SCALED:
        weight = tl.load(weights + slot, mask=token_mask, other=0)
        tl.store(out, canonical(result * weight[None, :]), mask=mask)
    else:
        tl.store(out, round_bf16(result), mask=mask)
