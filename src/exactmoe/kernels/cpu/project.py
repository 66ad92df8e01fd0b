"""One block of rows of one expert, times a few tokens: what gate_up, down and dense_mlp are made
of.

A weight comes as three arrays (ops/cpu/prepare.py makes them):
    experts  int64 [E, 3]: addresses of the expert's codes, of its block scales, and of its table:
    float32 [256, 16], the operands of the 16 codes under each scale byte, where a byte is used
    (FP8's scales are float32, read as they are)
    factors  float32 [E]: what the accumulator is multiplied by, or divided by
    layout   int64 [12]: see the names below
"""

import numpy as np

from exactmoe.kernels.cpu.compile import device
from exactmoe.kernels.cpu.dot import ROWS, TOKENS
from exactmoe.kernels.cpu.intrinsics import call_tile

BLOCK_ROWS = 32  # rows of one piece of work
CHUNK_TOKENS = 64  # tokens whose results a thread holds at a time
CODES, SCALES, TABLE = 0, 1, 2
# SCALE_ROWS: rows that share a row of block scales.
NUM_ROWS, COLUMNS, ROW_BYTES, SCALE_ROW_BYTES, SCALE_ROWS, DIVIDE = range(6)
TILES = 6  # addresses of the tiles of 1, 2 and 4 tokens, then of the fused ones

ONE = np.ones(1, np.float32)  # the token scale of everything but `a8`


@device
def token_addresses(values, scales, exact, slots, per_token, addresses):
    """Fill addresses int64 [3, n]: of the row of values, and of the row of scales, that each of n
    slots reads, and 1 where the row is exact (exact.py).

    per_token: slots that share a row (top_k for x, 1 for h). scales with no columns: no scales.
    """
    value_bytes = values.shape[1] * 4
    scale_bytes = scales.shape[1] * 4
    for i in range(slots.shape[0]):
        row = slots[i] // per_token
        addresses[0, i] = values.ctypes.data + row * value_bytes
        addresses[1, i] = scales.ctypes.data + row * scale_bytes if scale_bytes else ONE.ctypes.data
        addresses[2, i] = exact[row]


@device
def project(experts, factors, layout, expert, first_row, num_rows, addresses, geometry, out):
    """Accumulators with their global scale: out float32 [n, BLOCK_ROWS], columns from num_rows on
    are not written.

    addresses int64 [3, n] from token_addresses; geometry int64 [3] as in dot.py.
    """
    num_tokens = addresses.shape[1]
    last_row = first_row + num_rows - 1
    factor = factors[expert]
    rows = np.empty(2 * ROWS, np.int64)
    tokens = np.empty(8, np.int64)
    cells = np.empty(4 * ROWS, np.float32)
    for quad in range(first_row, first_row + num_rows, ROWS):
        for r in range(ROWS):
            row = min(quad + r, last_row)
            rows[r] = experts[expert, CODES] + row * layout[ROW_BYTES]
            scale_row = row // layout[SCALE_ROWS]
            rows[ROWS + r] = experts[expert, SCALES] + scale_row * layout[SCALE_ROW_BYTES]
        token = 0
        while token < num_tokens:
            left = num_tokens - token
            size = 0 if left == 1 else (1 if left == 2 else 2)
            width = 1 << size
            fused = 1
            for t in range(width):
                # A short group repeats its last token.
                source = min(token + t, num_tokens - 1)
                tokens[t] = addresses[0, source]
                tokens[4 + t] = addresses[1, source]
                fused &= addresses[2, source]
            call_tile(
                layout[TILES + fused * len(TOKENS) + size],
                rows.ctypes.data,
                rows.ctypes.data + 8 * ROWS,
                experts[expert, TABLE],
                tokens.ctypes.data,
                tokens.ctypes.data + 32,
                geometry.ctypes.data,
                cells.ctypes.data,
            )
            for t in range(min(width, left)):
                for r in range(min(ROWS, last_row + 1 - quad)):
                    value = cells[t * ROWS + r]
                    scaled = value / factor if layout[DIVIDE] else value * factor
                    out[token + t, quad - first_row + r] = scaled
            token += width


@device
def active_experts(offsets, active):
    """Fill active int64 [E] with the experts that serve a slot, ascending; gives their number."""
    count = 0
    for expert in range(offsets.shape[0] - 1):
        if offsets[expert + 1] > offsets[expert]:
            active[count] = expert
            count += 1
    return count
