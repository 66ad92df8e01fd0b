"""route_table: the slots of a call sorted by expert, stable, in one launch at every width.

A program owns four experts and reads all ids itself, so programs wait for nobody and no scratch is
needed. First pass: how many ids lie below its experts (there its part of the sorted order begins)
and on each of them. Second pass: the place of each of its slots, by a running sum. The counts of
the four experts share one int64, 16 bits each, so a block has at most 2^15 ids.
"""

import triton
import triton.language as tl

from exactmoe.kernels.triton.early import in_turn

OWNED = tl.constexpr(4)
_FIELD = tl.constexpr(16)


@triton.jit
def _fields(ids, first, last):
    """int64: 1 in the field of an id in [first, last), else 0; if it is one; its field's shift."""
    owned = (ids >= first) & (ids < last)
    shift = tl.where(owned, (ids - first) * _FIELD, 0).to(tl.int64)
    return owned.to(tl.int64) << shift, owned, shift


@triton.jit
def _field(fields, index: tl.constexpr):
    return ((fields >> (index * _FIELD)) & 0xFFFF).to(tl.int32)


@triton.jit
def route_table(
    expert_ids,  # int32 [S]
    offsets,  # int32 [E + 1]
    slots,  # int32 [S]
    fault,  # int64 [1]
    num_slots,
    num_experts,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (ceil((E + 1) / OWNED),); offsets[E] is written as if there were one expert more."""
    in_turn(PDL)
    first = tl.program_id(0) * OWNED
    last = tl.minimum(first + OWNED, num_experts)
    lanes = tl.arange(0, BLOCK_S)
    below = tl.zeros([BLOCK_S], tl.int32)
    largest = tl.full([BLOCK_S], -1, tl.int32)
    fields = tl.zeros([BLOCK_S], tl.int64)
    start = 0
    while start < num_slots:
        ids = tl.load(expert_ids + start + lanes, mask=start + lanes < num_slots, other=-1)
        below += ((ids >= 0) & (ids < first)).to(tl.int32)
        largest = tl.maximum(largest, ids)
        more, _, _ = _fields(ids, first, last)
        fields += more
        start += BLOCK_S
    begin_0 = tl.sum(below, 0)
    begin_1 = begin_0 + tl.sum(_field(fields, 0), 0)
    begin_2 = begin_1 + tl.sum(_field(fields, 1), 0)
    begin_3 = begin_2 + tl.sum(_field(fields, 2), 0)
    end = begin_3 + tl.sum(_field(fields, 3), 0)
    tl.store(offsets + first, begin_0)
    tl.store(offsets + first + 1, begin_1, mask=first + 1 <= num_experts)
    tl.store(offsets + first + 2, begin_2, mask=first + 2 <= num_experts)
    tl.store(offsets + first + 3, begin_3, mask=first + 3 <= num_experts)
    if first == 0:
        tl.store(fault, 1, mask=tl.max(largest, 0) >= num_experts)

    if end > begin_0:
        start = 0
        while start < num_slots:
            slot = start + lanes
            ids = tl.load(expert_ids + slot, mask=slot < num_slots, other=-1)
            more, owned, shift = _fields(ids, first, last)
            rank = ((tl.cumsum(more, 0) >> shift) & 0xFFFF).to(tl.int32) - 1
            low = tl.where(ids == first, begin_0, begin_1)
            high = tl.where(ids == first + 2, begin_2, begin_3)
            place = tl.where(ids < first + 2, low, high) + rank
            tl.store(slots + place, slot, mask=owned)
            total = tl.sum(more, 0)
            begin_0 += _field(total, 0)
            begin_1 += _field(total, 1)
            begin_2 += _field(total, 2)
            begin_3 += _field(total, 3)
            start += BLOCK_S
