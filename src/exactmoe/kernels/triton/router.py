"""router: the logits (contract section 4), 16 segments of k added as a binary tree.

`segments` writes the sums of all segments apart, so that a narrow call fills the card; `logits`
adds them inside a program. A weight of bfloat16 runs on the matrix units, acc[M, N] += W[M, k]
x[k, N], experts on the M side; a float32 weight runs in the 16 lanes of the CPU's order. A k tile
past its segment has zeros on both operands. No sum of dots is written as total + dot: the compiler
would carry the total through the matrix units.
"""

import triton
import triton.language as tl

from exactmoe.kernels.triton.early import in_turn
from exactmoe.kernels.triton.functions import INTERPRETED, to_float32

SEGMENTS = tl.constexpr(16)
LANES = tl.constexpr(16)


@triton.jit
def _tile(rows, count, hidden, start, end, values, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    """Rows [BLOCK] by k = start ... of values [count, hidden]; zeros beyond `end` and `count`."""
    k = start + tl.arange(0, BLOCK_K)
    place = rows.to(tl.int64)[:, None] * hidden + k[None, :]
    return tl.load(values + place, mask=(rows < count)[:, None] & (k < end)[None, :], other=0.0)


@triton.jit
def _half(lanes, M: tl.constexpr, N: tl.constexpr, LEFT: tl.constexpr):
    """Lanes [M, N, 2 x LEFT] -> j + (j + LEFT)."""
    left, right = tl.split(lanes.reshape(M, N, 2, LEFT).permute(0, 1, 3, 2))
    return left + right


@triton.jit
def _unit_chain(
    x, weight, tokens, experts, start, end, num_tokens, num_experts, hidden,
    STEPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Float32 [M, N] over k = start ... end on the matrix units."""
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(STEPS):
        k = start + step * BLOCK_K
        w = _tile(experts, num_experts, hidden, k, end, weight, BLOCK_M, BLOCK_K)
        v = _tile(tokens, num_tokens, hidden, k, end, x, BLOCK_N, BLOCK_K)
        if INTERPRETED:  # it multiplies bfloat16 as integers
            acc = tl.dot(to_float32(w), tl.trans(to_float32(v)), acc, input_precision="ieee")
        else:
            acc = tl.dot(w, tl.trans(v), acc)
    return acc


@triton.jit
def _lane_chain(
    x, weight, tokens, experts, start, end, num_tokens, num_experts, hidden,
    STEPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Float32 [M, N] over k = start ... end: lane j adds k = j, j + 16, ..., two roundings a step;
    then lanes j + (j + 8), + 4, + 2, + 1.
    """
    lanes = tl.zeros([BLOCK_M, BLOCK_N, LANES], tl.float32)
    for step in range(STEPS):
        k = start + step * LANES
        w = _tile(experts, num_experts, hidden, k, end, weight, BLOCK_M, LANES)
        v = to_float32(_tile(tokens, num_tokens, hidden, k, end, x, BLOCK_N, LANES))
        lanes += w[:, None, :] * v[None, :, :]
    lanes = _half(lanes, BLOCK_M, BLOCK_N, 8)
    lanes = _half(lanes, BLOCK_M, BLOCK_N, 4)
    lanes = _half(lanes, BLOCK_M, BLOCK_N, 2)
    return _half(lanes, BLOCK_M, BLOCK_N, 1).reshape(BLOCK_M, BLOCK_N)


@triton.jit
def _chain(
    x, weight, tokens, experts, segment, num_tokens, num_experts, hidden, per_segment,
    UNITS: tl.constexpr, STEPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Float32 [M, N] of one segment, from +0."""
    start = tl.multiple_of(segment * per_segment, 16)
    end = tl.multiple_of(tl.minimum(start + per_segment, hidden), 16)
    if UNITS:
        acc = _unit_chain(
            x, weight, tokens, experts, start, end, num_tokens, num_experts, hidden,
            STEPS, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    else:
        tl.static_assert(BLOCK_K == LANES)
        acc = _lane_chain(
            x, weight, tokens, experts, start, end, num_tokens, num_experts, hidden,
            STEPS, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    return acc


@triton.jit
def _store(out, acc, tokens, experts, num_tokens, num_experts):
    """acc [M, N] to out float32 [T, E]."""
    place = tokens.to(tl.int64)[None, :] * num_experts + experts[:, None]
    mask = (tokens < num_tokens)[None, :] & (experts < num_experts)[:, None]
    tl.store(out + place, acc, mask=mask)


@triton.jit
def segments(
    x,  # bfloat16 [T, H]
    weight,  # bfloat16 or float32 [E, H]
    parts,  # float32 [16, T, E]
    part_stride,  # elements from one segment to the next
    num_tokens,
    num_experts,
    hidden,
    per_segment,
    UNITS: tl.constexpr,
    STEPS: tl.constexpr,  # BLOCK_K of a segment
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (blocks of experts, blocks of tokens, SEGMENTS)."""
    in_turn(PDL)
    experts = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    tokens = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    segment = tl.program_id(2)
    acc = _chain(
        x, weight, tokens, experts, segment, num_tokens, num_experts, hidden, per_segment,
        UNITS, STEPS, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    out = parts + segment.to(tl.int64) * part_stride
    _store(out, acc, tokens, experts, num_tokens, num_experts)


@triton.jit
def logits(
    x,  # bfloat16 [T, H]
    weight,  # bfloat16 or float32 [E, H]
    out,  # float32 [T, E]
    num_tokens,
    num_experts,
    hidden,
    per_segment,
    UNITS: tl.constexpr,
    STEPS: tl.constexpr,  # BLOCK_K of a segment
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (blocks of experts, blocks of tokens). The tree holds one finished sum of 1, 2, 4 and 8
    segments at most, as a binary counter does.
    """
    in_turn(PDL)
    experts = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    tokens = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    one = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    two, four, eight = one, one, one
    for segment in range(SEGMENTS):
        acc = _chain(
            x, weight, tokens, experts, segment, num_tokens, num_experts, hidden, per_segment,
            UNITS, STEPS, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if segment % 2 == 0:
            one = acc
        else:
            pair = one + acc
            if segment % 4 == 1:
                two = pair
            else:
                quad = two + pair
                if segment % 8 == 3:
                    four = quad
                else:
                    half = four + quad
                    if segment == 7:
                        eight = half
                    else:
                        _store(out, eight + half, tokens, experts, num_tokens, num_experts)
