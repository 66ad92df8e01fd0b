"""combine: a token's slots to one row in the order of contract section 5; the last rounding."""

import numpy as np

from exactmoe.kernels.cpu.compile import device, kernel_jit
from exactmoe.kernels.cpu.functions import bf16_bits, canonical
from exactmoe.kernels.cpu.intrinsics import bits32, next_piece

GROUPS = 8
BLOCK = 512  # columns of one piece
_ZERO = np.float32(0.0)


@device
def _ordered(ids, weights, num_experts, order):
    """Fill order with the present k: ascending id, then the weight's bits; gives their number."""
    count = 0
    for k in range(ids.shape[0]):
        if 0 <= ids[k] < num_experts:
            place = count
            while place > 0:
                other = order[place - 1]
                if ids[other] < ids[k] or (
                    ids[other] == ids[k] and bits32(weights[other]) <= bits32(weights[k])
                ):
                    break
                order[place] = other
                place -= 1
            order[place] = k
            count += 1
    return count


@device
def _store(row, y_f32, y_bf16, token, first):
    """Write float32 row [W] to y [token, first : first + W], rounded once."""
    width = row.shape[0]
    if y_f32.shape[0]:
        wide = y_f32[token, first : first + width]
        for c in range(width):
            wide[c] = canonical(row[c])
    else:
        narrow = y_bf16[token, first : first + width]
        for c in range(width):
            narrow[c] = np.uint16(bf16_bits(row[c]))


@device
def _add(total, term):
    """total = total + term, elementwise."""
    for c in range(total.shape[0]):
        total[c] = total[c] + term[c]


@device
def _add_weighted(total, weight, term):
    """total = total + weight x term, elementwise, two roundings."""
    for c in range(total.shape[0]):
        total[c] = total[c] + weight * term[c]


@kernel_jit
def combine(slots, expert_ids, weights, num_experts, weighted, shared, y_f32, y_bf16, counter):
    """slots float32 [S, H], ids int32 [T, K], weights float32 [T, K], shared float32 [T, H] or
    [0, H].

    weighted: `a16`, s = s + weight x slot; else s = s + slot. One of y_f32 float32 and y_bf16
    uint16 is [T, H], the other [0, H].
    """
    num_tokens, top_k = expert_ids.shape
    hidden = slots.shape[1]
    num_blocks = -(-hidden // BLOCK)
    order = np.empty(top_k, np.int64)
    groups = np.empty((GROUPS, BLOCK), np.float32)
    while True:
        piece = next_piece(counter)
        if piece >= num_tokens * num_blocks:
            break
        token = piece // num_blocks
        first = (piece % num_blocks) * BLOCK
        last = min(first + BLOCK, hidden)
        width = last - first
        count = _ordered(expert_ids[token], weights[token], num_experts, order)
        groups[:] = _ZERO
        for i in range(count):
            k = order[i]
            group = groups[GROUPS * np.int64(expert_ids[token, k]) // num_experts, :width]
            slot = slots[token * top_k + k, first:last]
            if weighted:
                _add_weighted(group, weights[token, k], slot)
            else:
                _add(group, slot)
        step = 1
        while step < GROUPS:
            for left in range(0, GROUPS, 2 * step):
                _add(groups[left, :width], groups[left + step, :width])
            step *= 2
        total = groups[0, :width]
        if shared.shape[0]:
            _add(total, shared[token, first:last])
        _store(total, y_f32, y_bf16, token, first)


@kernel_jit
def finish(dense, y_f32, y_bf16, counter):
    """y = +0 + dense, float32 [T, H], rounded once; y_f32 and y_bf16 as in combine."""
    row = np.empty(dense.shape[1], np.float32)
    while True:
        token = next_piece(counter)
        if token >= dense.shape[0]:
            break
        row[:] = _ZERO
        _add(row, dense[token])
        _store(row, y_f32, y_bf16, token, 0)
