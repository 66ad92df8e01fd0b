"""select: scores, expert ids and weights of each token (contract section 6), a program a token.

A key and its expert's id are one int64, so that one integer maximum is the contract's rule: the
larger key first, equal keys (-0 = +0) by the lower id, NaN keys last by the lower id.
"""

import triton
import triton.language as tl

from exactmoe.kernels.triton.early import in_turn
from exactmoe.kernels.triton.functions import canonical, router_score, through_bf16

_LOWEST32, _NOTHING = tl.constexpr(-(2**31)), tl.constexpr(-(2**63))


@triton.jit
def _pairs(values, COUNT: tl.constexpr):
    """A tuple of 2 x COUNT blocks -> of COUNT sums of neighbours."""
    sums = ()
    for i in tl.static_range(COUNT):
        sums = sums + (values[2 * i] + values[2 * i + 1],)
    return sums


@triton.jit
def _tree(parts, part_stride, mask):
    """The binary tree over the 16 segments; all loads come before the first sum."""
    values = ()
    for segment in tl.static_range(16):
        place = part_stride.to(tl.int64) * segment
        values = values + (tl.load(parts + place, mask=mask, other=0.0),)
    return _pairs(_pairs(_pairs(_pairs(values, 8), 4), 2), 1)[0]


@triton.jit
def _rounded(values, LADDER: tl.constexpr):
    return through_bf16(values) if LADDER else values


@triton.jit
def _ordered(keys, ids, BLOCK_E: tl.constexpr):
    """int64 that orders as the contract does; _NOTHING is less than each of them."""
    bits = keys.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = tl.where(keys == 0.0, 0, order)
    order = tl.where(keys != keys, _LOWEST32, order)
    return (order.to(tl.int64) << 32) + (BLOCK_E - ids)


@triton.jit
def _at(vector, index):
    """The element of a float32 vector; an exact sum, because all others are 0."""
    lanes = tl.arange(0, vector.shape[0])
    return tl.sum(tl.where(lanes == index, vector, 0.0), 0)


@triton.jit
def select(
    logits,  # float32 [T, E]; written where PARTS
    parts,  # float32 [16, T, E], the segments' sums; read where PARTS
    part_stride,  # elements from one segment to the next
    bias,  # float32 [E]; read where BIASED
    table,  # int64 [V, K]; read where HASHED
    token_ids,  # int64 [T]; read where HASHED
    expert_ids,  # int32 [T, K]
    weights,  # float32 [T, K]
    num_experts,
    table_rows,
    factor,
    PARTS: tl.constexpr,
    BIASED: tl.constexpr,
    HASHED: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr,
    LADDER: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (T,). A token id outside the table, or an id there of no expert: id E, weight 0."""
    in_turn(PDL)
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    k = tl.arange(0, BLOCK_K)
    known = e < num_experts
    place = token * num_experts + e
    if HASHED:
        row = tl.load(token_ids + token)
        in_table = (row >= 0) & (row < table_rows)
        found = tl.load(table + row * TOP_K + k, mask=(k < TOP_K) & in_table, other=-1)
    if BIASED:
        added = tl.load(bias + e, mask=known, other=0.0)
    if PARTS:
        logit = _tree(parts + place, part_stride, known)
        tl.store(logits + place, logit, mask=known)
    else:
        logit = tl.load(logits + place, mask=known, other=0.0)

    if HASHED:
        present = (found >= 0) & (found < num_experts)
        ids = tl.where(present, found, num_experts).to(tl.int32)
        chosen = tl.gather(logit, tl.where(present, ids, 0), 0)
        score = _rounded(router_score(chosen, SIGMOID), LADDER)
    else:
        scores = _rounded(router_score(logit, SIGMOID), LADDER)
        keys = scores
        if BIASED:
            keys = _rounded(scores + added, LADDER)
        waiting = tl.where(known, _ordered(keys, e, BLOCK_E), _NOTHING)
        ids = tl.zeros([BLOCK_K], tl.int32)
        for i in range(TOP_K):
            best = tl.max(waiting, 0)
            waiting = tl.where(waiting == best, _NOTHING, waiting)
            ids = tl.where(k == i, (BLOCK_E - (best & 0xFFFFFFFF)).to(tl.int32), ids)
        present = k < TOP_K
        score = tl.gather(scores, ids, 0)

    score = tl.where(present, score, 0.0)
    weight = score
    if NORMALIZE:
        total = tl.zeros([1], tl.float32)
        for i in tl.static_range(TOP_K):
            total = _rounded(total + _at(score, i), LADDER)
        weight = _rounded(tl.div_rn(score, tl.broadcast_to(total + 1e-20, [BLOCK_K])), LADDER)
    weight = canonical(_rounded(weight * factor, LADDER))
    tl.store(expert_ids + token * TOP_K + k, ids, mask=k < TOP_K)
    tl.store(weights + token * TOP_K + k, tl.where(present, weight, 0.0), mask=k < TOP_K)
