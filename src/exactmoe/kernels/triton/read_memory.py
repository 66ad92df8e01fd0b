"""Reads memory and nothing else: what a benchmark takes for the read rate of a card.

Each program reads one piece of one segment and stores its exclusive or, so that no load can be
left out.
"""

import triton
import triton.language as tl


@triton.jit
def read_segments(
    memory,  # int32
    starts,  # int64 [segments]: first element of each, a multiple of BLOCK
    results,  # int32 [programs]
    PIECES: tl.constexpr,  # of a segment
    STEPS: tl.constexpr,  # blocks of a piece
    BLOCK: tl.constexpr,  # elements
):
    program = tl.program_id(0)
    segment, piece = program // PIECES, program % PIECES
    # Without the multiple each element is a load of its own.
    start = tl.multiple_of(tl.load(starts + segment), BLOCK)
    first = start + piece.to(tl.int64) * (STEPS * BLOCK)
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int32)
    for step in tl.static_range(STEPS):
        total ^= tl.load(memory + first + step * BLOCK + lanes)
    tl.store(results + program, tl.xor_sum(total))
