"""What several cards add to the path of one: they look up ids, carry bytes, join slots and vectors.

Nothing here computes but the tree of `combine_partials`: all else moves whole words. Numbers that
change from call to call are not specialised on, so that a captured call compiles nothing anew.
"""

import triton
import triton.language as tl

from exactmoe.kernels.triton.combine import store_row


@triton.jit(do_not_specialize=["num_slots"])
def look_up(
    expert_ids,  # int32 [S]
    tables,  # int32 [N, E + 2]: of ids -1 ... E
    found,  # int32 [N, S]
    num_slots,
    NUM_EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (ceil(S / BLOCK), N). Any id is looked up: the ends are for absent ones."""
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    table = tl.program_id(1)
    mask = slot < num_slots
    ids = tl.load(expert_ids + slot, mask=mask, other=-1)
    place = tl.minimum(tl.maximum(ids, -1), NUM_EXPERTS) + 1
    value = tl.load(tables + table * (NUM_EXPERTS + 2) + place, mask=mask, other=-1)
    tl.store(found + table.to(tl.int64) * num_slots + slot, value, mask=mask)


@triton.jit
def take_slots(
    owners,  # int32 [S]: the card of each slot
    returned,  # int32 words [S, WORDS]
    slots,  # int32 words [S, WORDS]
    CARD: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (S, ceil(WORDS / BLOCK)). The words of a card's slots, as they are."""
    slot = tl.program_id(0).to(tl.int64)
    if tl.load(owners + slot) == CARD:
        word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = word < WORDS
        place = slot * WORDS + word
        tl.store(slots + place, tl.load(returned + place, mask=mask, other=0), mask=mask)


@triton.jit(do_not_specialize=["num_slots"])
def count_served(
    owners,  # int32 [S]: the card of each slot; absent: -1
    own,  # int32 [1]: slots that the owner's card served
    served,  # int32 [PEERS]: slots that each other card served
    lost,  # int64 [1]
    num_slots,
    PEERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (1,). lost grows by how far the served slots are from those of the call."""
    lanes = tl.arange(0, BLOCK)
    present = tl.zeros([BLOCK], tl.int32)
    start = 0
    while start < num_slots:
        card = tl.load(owners + start + lanes, mask=start + lanes < num_slots, other=-1)
        present += (card >= 0).to(tl.int32)
        start += BLOCK
    found = tl.load(own).to(tl.int64)
    for peer in tl.static_range(PEERS):
        found += tl.load(served + peer).to(tl.int64)
    more = tl.sum(present, 0).to(tl.int64) - found
    tl.store(lost, tl.load(lost) + tl.where(more < 0, -more, more))


@triton.jit
def _copy(source, target, count, BLOCK: tl.constexpr):
    word = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = word < count
    tl.store(target + word, tl.load(source + word, mask=mask, other=0), mask=mask)


@triton.jit(do_not_specialize=["count_0", "count_1", "count_2", "count_3", "place", "target_place"])
def carry(
    source_0,  # int32 words of another card's memory, mapped into this one
    source_1,
    source_2,
    source_3,
    target_0,  # int32 words of this card's memory
    target_1,
    target_2,
    target_3,
    count_0,  # words
    count_1,
    count_2,
    count_3,
    word,  # one int32 beside them: word[place] -> word_target[target_place]
    place,
    word_target,
    target_place,
    PARTS: tl.constexpr,
    WORD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (ceil(largest count / BLOCK), PARTS)."""
    part = tl.program_id(1)
    _copy(source_0, target_0, tl.where(part == 0, count_0, 0), BLOCK)
    if PARTS > 1:
        _copy(source_1, target_1, tl.where(part == 1, count_1, 0), BLOCK)
    if PARTS > 2:
        _copy(source_2, target_2, tl.where(part == 2, count_2, 0), BLOCK)
    if PARTS > 3:
        _copy(source_3, target_3, tl.where(part == 3, count_3, 0), BLOCK)
    if WORD:
        once = (part == 0) & (tl.program_id(0) == 0)
        tl.store(word_target + target_place, tl.load(word + place, mask=once, other=0), mask=once)


@triton.jit
def _pairs(values, COUNT: tl.constexpr):
    """A tuple of 2 x COUNT blocks -> of COUNT sums of neighbours."""
    sums = ()
    for i in tl.static_range(COUNT):
        sums = sums + (values[2 * i] + values[2 * i + 1],)
    return sums


@triton.jit(do_not_specialize=["stride"])
def combine_partials(
    vectors,  # float32; vector v of token t begins at v * stride + t * HIDDEN
    stride,
    shared,  # float32 [T, HIDDEN]; not read without SHARED
    y,  # bfloat16 or float32 [T, HIDDEN]
    HIDDEN: tl.constexpr,
    PLACES: tl.constexpr,  # 4 bits a group: 1 + the vector in its place; 0: none
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (T, ceil(HIDDEN / BLOCK)). The tree over the 8 groups (contract section 5).

    A vector stands in the place of its subtree's first group; adding +0 for the others changes no
    bit, since no sum is -0.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < HIDDEN
    first = token * HIDDEN + column
    groups = ()
    for group in tl.static_range(8):
        value = tl.zeros([BLOCK], tl.float32)
        if (PLACES >> (4 * group)) & 15 > 0:
            vector = ((PLACES >> (4 * group)) & 15) - 1
            place = vector * stride.to(tl.int64) + first
            value = tl.load(vectors + place, mask=mask, other=0.0)
        groups = groups + (value,)
    total = _pairs(_pairs(_pairs(groups, 4), 2), 1)[0]
    if SHARED:
        total += tl.load(shared + first, mask=mask, other=0.0)
    store_row(y, first, total, mask)
