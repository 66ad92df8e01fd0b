"""gate_up.py in two launches: gate writes its sums, up reads them and does the rest. Same bits.

A lane of the matrix unit sums one row and one token, so it does not matter which rows lie beside.
"""

import triton
import triton.language as tl

from exactmoe.kernels.triton.down import down_tile
from exactmoe.kernels.triton.functions import canonical, round_bf16, swiglu32
from exactmoe.kernels.triton.work import find_tile


@triton.jit
def gate_then_up(
    x,
    weight,
    routes,
    weights,
    sums,
    h,
    limit,
    num_experts,
    top_k,
    rows,
    COLUMNS: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALED: tl.constexpr,
    DIVIDE: tl.constexpr,
    CLAMP: tl.constexpr,
    LAST: tl.constexpr,
    BY_SLOT: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PIN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """x, routes, weights, h: as in gate_up.py. sums float32 [S, I] (values, row stride): what gate
    leaves for up (LAST), at the slot's place. Grid: token tiles x row blocks.
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
    result, row, row_mask = down_tile(
        weight, expert, block, tokens, token_mask, rows, COLUMNS, COLUMNS,
        FORMAT, SCALED, DIVIDE, PIN, ROWS, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    mask = row_mask[:, None] & token_mask[None, :]
    between = sums[0] + slot[None, :] * sums[1] + row[:, None]
    if LAST:
        gate = tl.load(between, mask=mask, other=0)
        result = swiglu32(gate, result, limit, CLAMP)
        pointers = h[0] + slot[None, :] * h[1] + row[:, None]
        if SCALED:
            weight_of_slot = tl.load(weights + slot, mask=token_mask, other=0)
            tl.store(pointers, canonical(result * weight_of_slot[None, :]), mask=mask)
        else:
            tl.store(pointers, round_bf16(result), mask=mask)
    else:
        tl.store(between, result, mask=mask)
