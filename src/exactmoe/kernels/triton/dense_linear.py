"""dense_linear: the tile of down.py over one linear layer, whose groups have inputs of their own.

x bfloat16 [T, G, K]; out float32 [T, G, N], or (ROUND) bfloat16 bits. k is cut into segments.
"""

import triton
import triton.language as tl

from exactmoe.kernels.triton.dense_mlp import find_dense_tile
from exactmoe.kernels.triton.down import down_tile
from exactmoe.kernels.triton.functions import canonical, round_bf16


@triton.jit
def dense_linear(
    x,
    weight,
    out,
    num_tokens,
    rows,
    COLUMNS: tl.constexpr,
    SEGMENT: tl.constexpr,
    FORMAT: tl.constexpr,
    DIVIDE: tl.constexpr,
    ROUND: tl.constexpr,
    GROUP: tl.constexpr,
    PIN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """x and out: (values, token stride, group stride). Grid: (row blocks x token tiles, G)."""
    group = tl.program_id(1).to(tl.int64)
    block, token, token_mask = find_dense_tile(tl.cdiv(rows, ROWS), num_tokens, GROUP, BLOCK_N)
    tokens = (x[0] + group * x[2] + token * x[1], x[0])
    result, row, row_mask = down_tile(
        weight, group, block, tokens, token_mask, rows, COLUMNS, SEGMENT,
        FORMAT, False, DIVIDE, PIN, ROWS, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    pointers = out[0] + group * out[2] + token[None, :] * out[1] + row[:, None]
    mask = row_mask[:, None] & token_mask[None, :]
    if ROUND:
        tl.store(pointers, round_bf16(result + 0.0), mask=mask)  # no -0, as in finish.py
    else:
        tl.store(pointers, canonical(result), mask=mask)
