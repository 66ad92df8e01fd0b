"""down: the slot of every (token, expert), cut over (expert, block of rows)."""

import numpy as np

from exactmoe.kernels.cpu.compile import kernel_jit
from exactmoe.kernels.cpu.exact import exact_rows
from exactmoe.kernels.cpu.functions import canonical, round_bf16
from exactmoe.kernels.cpu.intrinsics import next_piece
from exactmoe.kernels.cpu.project import (
    BLOCK_ROWS,
    CHUNK_TOKENS,
    NUM_ROWS,
    active_experts,
    project,
    token_addresses,
)


@kernel_jit
def down(values, scales, weight, routes, geometry, round_slot, out, counter):
    """out float32 [S, H] at each slot's own place; values float32 [S, I]; the rest: gate_up.py."""
    offsets, slots = routes
    num_rows = weight[2][NUM_ROWS]
    num_blocks = -(-num_rows // BLOCK_ROWS)
    active = np.empty(offsets.shape[0], np.int64)
    num_active = active_experts(offsets, active)
    exact = np.empty(values.shape[0], np.bool_)
    exact_rows(values, exact)
    addresses = np.empty((3, CHUNK_TOKENS), np.int64)
    block = np.empty((CHUNK_TOKENS, BLOCK_ROWS), np.float32)
    while True:
        piece = next_piece(counter)
        if piece >= num_active * num_blocks:
            break
        expert = active[piece // num_blocks]
        first_row = (piece % num_blocks) * BLOCK_ROWS
        rows = min(BLOCK_ROWS, num_rows - first_row)
        for first in range(offsets[expert], offsets[expert + 1], CHUNK_TOKENS):
            served = slots[first : min(first + CHUNK_TOKENS, offsets[expert + 1])]
            read = addresses[:, : served.shape[0]]
            token_addresses(values, scales, exact, served, 1, read)
            project(weight[0], weight[1], weight[2], expert, first_row, rows, read, geometry, block)
            for i in range(served.shape[0]):
                slot = served[i]
                for r in range(rows):
                    value = block[i, r]
                    out[slot, first_row + r] = round_bf16(value) if round_slot else canonical(value)
