"""dense_mlp: the tiles of gate_up.py and down.py over one expert that serves every token.

x bfloat16 [T, H]; h bfloat16 bits [T, I]; out float32 [T, H]. k is cut into segments.
"""

import triton
import triton.language as tl

from exactmoe.kernels.triton.down import down_tile
from exactmoe.kernels.triton.functions import canonical, round_bf16
from exactmoe.kernels.triton.gate_up import gate_up_tile


@triton.jit
def find_dense_tile(num_row_blocks, num_tokens, GROUP: tl.constexpr, BLOCK_N: tl.constexpr):
    """(row block, tokens [N], which of them are real) of a program.

    GROUP token tiles go over all row blocks together, so that L2 holds their tokens and a weight
    tile is read for all of them at once.
    """
    num_tiles = tl.cdiv(num_tokens, BLOCK_N)
    group = tl.program_id(0) // (GROUP * num_row_blocks)
    rest = tl.program_id(0) % (GROUP * num_row_blocks)
    tiles = tl.minimum(num_tiles - group * GROUP, GROUP)
    token = (group * GROUP + rest % tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    return rest // tiles, token.to(tl.int64), token < num_tokens


@triton.jit
def dense_gate_up(
    x,
    gate,
    up,
    h,
    limit,
    num_tokens,
    rows,
    COLUMNS: tl.constexpr,
    SEGMENT: tl.constexpr,
    FORMAT: tl.constexpr,
    DIVIDE_GATE: tl.constexpr,
    DIVIDE_UP: tl.constexpr,
    CLAMP: tl.constexpr,
    GROUP: tl.constexpr,
    PIN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """x and h: (values, row stride). Grid: row blocks x token tiles."""
    block, token, token_mask = find_dense_tile(tl.cdiv(rows, ROWS), num_tokens, GROUP, BLOCK_N)
    tokens = (x[0] + token * x[1], x[0])
    result, row, row_mask = gate_up_tile(
        gate, up, 0, block, tokens, token_mask, limit, rows, COLUMNS, SEGMENT,
        FORMAT, False, DIVIDE_GATE, DIVIDE_UP, CLAMP, PIN, ROWS, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    pointers = h[0] + token[None, :] * h[1] + row[:, None]
    tl.store(pointers, round_bf16(result), mask=row_mask[:, None] & token_mask[None, :])


@triton.jit
def dense_down(
    h,
    weight,
    out,
    num_tokens,
    rows,
    COLUMNS: tl.constexpr,
    SEGMENT: tl.constexpr,
    FORMAT: tl.constexpr,
    DIVIDE: tl.constexpr,
    GROUP: tl.constexpr,
    PIN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """h and out: (values, row stride). Grid: row blocks x token tiles."""
    block, token, token_mask = find_dense_tile(tl.cdiv(rows, ROWS), num_tokens, GROUP, BLOCK_N)
    tokens = (h[0] + token * h[1], h[0])
    result, row, row_mask = down_tile(
        weight, 0, block, tokens, token_mask, rows, COLUMNS, SEGMENT,
        FORMAT, False, DIVIDE, PIN, ROWS, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    pointers = out[0] + token[None, :] * out[1] + row[:, None]
    tl.store(pointers, canonical(result), mask=row_mask[:, None] & token_mask[None, :])
