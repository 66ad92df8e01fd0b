"""Which expert, which of its slots: the work of a program, found from offsets on the device.

The grid is min(S, S // N + E) token tiles whatever the routing (ops/triton/launch.py). With as many
programs as slots, program s is its expert's tile if slot s begins one; otherwise expert e owns the
programs from offsets[e] // N + e on, which are at least as many as its tiles. The rest are holes.
"""

import triton
import triton.language as tl


@triton.jit
def find_tile(
    offsets, index, num_experts, BY_SLOT: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr
):
    """(expert int64, first sorted slot, end of the expert's slots) of token tile `index`.

    A hole has first >= end. offsets int32 [E + 1].
    """
    experts = tl.arange(0, BLOCK_E)
    known = experts < num_experts
    if BY_SLOT:
        ends = tl.load(offsets + experts + 1, mask=known, other=0)
        expert = tl.sum((known & (ends <= index)).to(tl.int32), 0)
        expert = tl.minimum(expert, num_experts - 1)
        start, end = tl.load(offsets + expert), tl.load(offsets + expert + 1)
        first = tl.where((index - start) % BLOCK_N == 0, index, end)
    else:
        begins = tl.load(offsets + experts, mask=known, other=0) // BLOCK_N + experts
        expert = tl.sum((known & (begins <= index)).to(tl.int32), 0) - 1
        start, end = tl.load(offsets + expert), tl.load(offsets + expert + 1)
        first = start + (index - start // BLOCK_N - expert) * BLOCK_N
    return expert.to(tl.int64), first, end
