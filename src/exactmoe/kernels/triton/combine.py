"""combine: a token's slots to one row, in the order of contract section 5, and the last rounding.

A program is one warp: one token by BLOCK_H columns. It ranks the token's K slots by (id, bits of
the weight), so that their rows, read in that order, can all be in flight at once. The 8 groups'
tree needs no 8 sums: ids ascend, so three waiting left siblings (of a group, a pair, a quad) hold
everything that is complete. Adding the +0 of an empty group changes no bit, since no sum is -0.
"""

import triton
import triton.language as tl

from exactmoe.kernels.triton.early import in_turn
from exactmoe.kernels.triton.functions import canonical, round_bf16, to_float32

GROUPS = tl.constexpr(8)
IN_FLIGHT = tl.constexpr(8)  # rows of slots that a program asks for before it adds
_ABSENT = tl.constexpr(2**62)


@triton.jit
def _keys(expert_ids, weights, k, first, num_experts, TOP_K: tl.constexpr):
    """int64 sort keys of slots k of the token whose ids begin at `first`; absent ids come last."""
    known = k < TOP_K
    ids = tl.load(expert_ids + first + k, mask=known, other=-1)
    bits = tl.load(weights + first + k, mask=known, other=0.0).to(tl.uint32, bitcast=True)
    key = (ids.to(tl.int64) << 32) | bits.to(tl.int64)
    return tl.where((ids >= 0) & (ids < num_experts), key, _ABSENT), ids


@triton.jit
def store_row(y, place, values, mask):
    """Float32 values to y, float32 or bfloat16, rounded once, NaN canonical."""
    if y.dtype.element_ty == tl.float32:
        tl.store(y + place, canonical(values), mask=mask)
    else:
        tl.store(y + place, round_bf16(values).to(tl.bfloat16, bitcast=True), mask=mask)


@triton.jit
def combine(
    slots,  # bfloat16 or float32 [T x K, H]
    expert_ids,  # int32 [T, K]
    weights,  # float32 [T, K]
    shared,  # float32 [T, H]; not read without SHARED
    y,  # bfloat16 or float32 [T, H]
    num_experts,
    hidden,
    TOP_K: tl.constexpr,
    WEIGHTED: tl.constexpr,  # `a16`: s + weight x slot; else s + slot
    SHARED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (T, ceil(H / BLOCK_H))."""
    in_turn(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = column < hidden
    first = token * TOP_K
    k = tl.arange(0, BLOCK_K)
    mine, ids = _keys(expert_ids, weights, k[:, None], first, num_experts, TOP_K)
    other, _ = _keys(expert_ids, weights, k[None, :], first, num_experts, TOP_K)
    before = (other < mine) | ((other == mine) & (k[None, :] < k[:, None]))
    rank = tl.sum(before.to(tl.int32), 1)
    # One word a slot: its group, and where it lies. Absent slots have neither.
    here = tl.sum(
        tl.where(mine < _ABSENT, ids * GROUPS // num_experts * BLOCK_K + k[:, None], -1), 1
    )

    if SHARED:
        added = tl.load(shared + token * hidden + column, mask=mask, other=0.0)
        tl.debug_barrier()  # keeps the load here: the compiler would put it off to its use
    current = tl.zeros([BLOCK_H], tl.float32)
    group_left, pair_left, quad_left = current, current, current
    last_group = 0
    BATCH: tl.constexpr = min(TOP_K, IN_FLIGHT)
    for batch in range((TOP_K + BATCH - 1) // BATCH):
        groups, rows, factors = (), (), ()
        for i in tl.static_range(BATCH):
            word = tl.sum(tl.where(rank == batch * BATCH + i, here, 0), 0)
            present = word >= 0  # nothing has a rank beyond the last slot's
            place = first + tl.where(present, word % BLOCK_K, 0)
            row = tl.load(slots + place * hidden + column, mask=mask & present, other=0.0)
            factor = 1.0
            if WEIGHTED:
                factor = tl.load(weights + place, mask=present, other=0.0)
            groups = groups + (tl.where(present, word // BLOCK_K, -1),)
            rows, factors = rows + (row,), factors + (factor,)
        for i in tl.static_range(BATCH):
            term = to_float32(rows[i])
            if WEIGHTED:
                term = factors[i] * term
            group = tl.where(groups[i] >= 0, groups[i], last_group)
            moved = group ^ last_group
            pair = group_left + current
            quad = pair_left + pair
            quad_left = tl.where(moved >= 4, quad, quad_left)
            pair_left = tl.where(moved >= 4, 0.0, tl.where(moved >= 2, pair, pair_left))
            group_left = tl.where(moved >= 2, 0.0, tl.where(moved >= 1, current, group_left))
            current = tl.where(moved >= 1, 0.0, current) + term
            last_group = group
    total = quad_left + (pair_left + (group_left + current))
    if SHARED:
        total += added
    store_row(y, token * hidden + column, total, mask)
