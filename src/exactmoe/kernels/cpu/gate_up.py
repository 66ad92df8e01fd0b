"""gate_up: h = silu(min(g, L)) x clamp(u, -L, L) of every slot, cut over blocks of rows."""

import numpy as np

from exactmoe.kernels.cpu.compile import device, kernel_jit
from exactmoe.kernels.cpu.exact import exact_rows
from exactmoe.kernels.cpu.functions import canonical, round_bf16, swiglu32
from exactmoe.kernels.cpu.intrinsics import next_piece
from exactmoe.kernels.cpu.project import (
    BLOCK_ROWS,
    CHUNK_TOKENS,
    NUM_ROWS,
    active_experts,
    project,
    token_addresses,
)

# Plain loops over one row: LLVM makes vector code of them.


@device
def _swiglu(g, u, limit, out):
    for r in range(out.shape[0]):
        out[r] = swiglu32(g[r], u[r], limit)


@device
def _multiply(row, factor):
    for r in range(row.shape[0]):
        row[r] = row[r] * factor


@device
def _store(row, round_h):
    if round_h:
        for r in range(row.shape[0]):
            row[r] = round_bf16(row[r])
    else:
        for r in range(row.shape[0]):
            row[r] = canonical(row[r])


@kernel_jit
def gate_up(values, scales, gate, up, routes, geometry, weights, limit, round_h, h, counter):
    """h float32 [S, I] at each slot's own place.

    values float32 [T, K], scales float32 [T, K // 128] or [T, 0]; gate, up: (experts, factors,
    layout) of project.py;
    routes: (offsets int64 [E + 1], slots int64 [S]); geometry int64 [3]; weights float32 [S], or
    [0]: h is not multiplied; round_h: to bfloat16.
    """
    offsets, slots = routes
    per_token = max(h.shape[0] // max(values.shape[0], 1), 1)
    num_rows = gate[2][NUM_ROWS]
    num_blocks = -(-num_rows // BLOCK_ROWS)
    active = np.empty(offsets.shape[0], np.int64)
    num_active = active_experts(offsets, active)
    exact = np.empty(values.shape[0], np.bool_)
    exact_rows(values, exact)
    addresses = np.empty((3, CHUNK_TOKENS), np.int64)
    g = np.empty((CHUNK_TOKENS, BLOCK_ROWS), np.float32)
    u = np.empty((CHUNK_TOKENS, BLOCK_ROWS), np.float32)
    weighted = weights.shape[0] > 0
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
            token_addresses(values, scales, exact, served, per_token, read)
            project(gate[0], gate[1], gate[2], expert, first_row, rows, read, geometry, g)
            project(up[0], up[1], up[2], expert, first_row, rows, read, geometry, u)
            for i in range(served.shape[0]):
                slot = served[i]
                row = h[slot, first_row : first_row + rows]
                _swiglu(g[i, :rows], u[i, :rows], limit, row)
                if weighted:
                    _multiply(row, weights[slot])
                _store(row, round_h)
