"""One projection of one tile: acc[M, N] += W[M, k] x[k, N], weights on the M side, k ascending.

M rows of the weight, N tokens. The chains of contract section 4: `a16` one float32 chain; a SCALED
call (`a8`: x in e4m3 codes) and an fp8 weight one chain per 128 of k, acc = fma(chain, scale, acc)
from +0; dense parts anew from +0 every SEGMENT of k, added ascending. A k tile that reaches past
the row has zeros on both operands.

A weight is the tuple `arguments` of ops/triton/prepare.py.
"""

import triton
import triton.language as tl

from exactmoe.kernels.triton.functions import INTERPRETED, fma32
from exactmoe.kernels.triton.unpack import e4m3_operand, fp4_operand, in_k_order

_SCALE_ROWS = tl.constexpr(128)
# What unpack.py left out of an NVFP4 operand.
_NVFP4_UNIT = tl.constexpr(2.0**8)


@triton.jit
def weight_rows(weight, expert, row, FORMAT: tl.constexpr):
    """Of rows int32 [M] of an expert: pointers to codes and block scales, and p + 127 int32 [M]."""
    codes, scales, exponents, _, codes_expert, codes_row, scales_expert, scales_row = weight
    row = row.to(tl.int64)
    scale_row = row // _SCALE_ROWS if FORMAT == "fp8" else row
    code_pointers = codes + expert * codes_expert + row * codes_row
    scale_pointers = scales + expert * scales_expert + scale_row * scales_row
    exponent = tl.zeros_like(row).to(tl.int32)
    if FORMAT == "mxfp4":
        exponent += tl.load(exponents + expert)
    return code_pointers, scale_pointers, exponent


@triton.jit
def apply_factor(acc, weight, expert, FORMAT: tl.constexpr, DIVIDE: tl.constexpr):
    """The epilogue of a dot, one rounding: acc x global, acc / global, or acc x 2^p (MXFP4)."""
    if FORMAT == "nvfp4":
        acc = acc * _NVFP4_UNIT
    if FORMAT == "nvfp4" or FORMAT == "mxfp4":
        factor = tl.load(weight[3] + expert)
        acc = tl.div_rn(acc, tl.zeros_like(acc) + factor) if DIVIDE else acc * factor
    return acc


@triton.jit
def _weight_tile(
    rows,
    row_mask,
    k,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
    FORMAT: tl.constexpr,
    PIN: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """bfloat16 [M, BLOCK_K] from k on."""
    code_pointers, scale_pointers, exponent = rows
    mask = row_mask[:, None]
    if FORMAT == "nvfp4" or FORMAT == "mxfp4":
        BLOCK: tl.constexpr = 16 if FORMAT == "nvfp4" else 32
        byte = k // 2 + tl.arange(0, BLOCK_K // 2)[None, :]
        block = k // BLOCK + tl.arange(0, BLOCK_K // BLOCK)[None, :]
        byte_mask = mask if EVEN else mask & (byte < COLUMNS // 2)
        block_mask = mask if EVEN else mask & (block < COLUMNS // BLOCK)
        codes = tl.load(code_pointers[:, None] + byte, mask=byte_mask, other=0)
        scales = tl.load(scale_pointers[:, None] + block, mask=block_mask, other=0)
        tile = in_k_order(fp4_operand(codes, scales, exponent[:, None], FORMAT, BLOCK), PIN)
    else:
        column = k + tl.arange(0, BLOCK_K)[None, :]
        column_mask = mask if EVEN else mask & (column < COLUMNS)
        tile = tl.load(code_pointers[:, None] + column, mask=column_mask, other=0)
        if FORMAT == "fp8":
            tile = in_k_order(e4m3_operand(tile, False), PIN)
    return tile


@triton.jit
def _token_tile(
    pointers,
    token_mask,
    k,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
    SCALED: tl.constexpr,
    PIN: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """bfloat16 [BLOCK_K, N] from k on: values, or (`a8`) the values of codes."""
    column = k + tl.arange(0, BLOCK_K)[:, None]
    mask = token_mask[None, :]
    column_mask = mask if EVEN else mask & (column < COLUMNS)
    values = tl.load(pointers[None, :] + column, mask=column_mask, other=0)
    if SCALED:
        values = in_k_order(e4m3_operand(values, True), PIN)
    return values


@triton.jit
def _multiply(w, x, acc):
    if INTERPRETED:  # which multiplies bfloat16 as integers
        acc = tl.dot(w.to(tl.float32), x.to(tl.float32), acc, input_precision="ieee")
    else:
        acc = tl.dot(w, x, acc)
    return acc


@triton.jit
def _chain(
    rows,
    row_mask,
    tokens,
    token_mask,
    START: tl.constexpr,
    COLUMNS: tl.constexpr,
    SEGMENT: tl.constexpr,
    FORMAT: tl.constexpr,
    PIN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Float32 [M, N] over SEGMENT of k from START on: one chain from +0."""
    EVEN: tl.constexpr = COLUMNS % BLOCK_K == 0
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(START, min(START + SEGMENT, COLUMNS), BLOCK_K):
        w = _weight_tile(rows, row_mask, k, COLUMNS, EVEN, FORMAT, PIN, BLOCK_K)
        x = _token_tile(tokens[0], token_mask, k, COLUMNS, EVEN, False, PIN, BLOCK_K)
        acc = _multiply(w, x, acc)
    return acc


@triton.jit
def _chains_of_128(
    rows,
    row_mask,
    tokens,
    token_mask,
    START: tl.constexpr,
    COLUMNS: tl.constexpr,
    SEGMENT: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALED: tl.constexpr,
    PIN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Float32 [M, N] over SEGMENT of k from START on: acc = fma(chain, scale, acc) from +0.

    The scale is the token's (SCALED) or that of the weight's block.
    """
    tl.static_assert(BLOCK_K == 128)  # a step is a chain
    EVEN: tl.constexpr = COLUMNS % BLOCK_K == 0
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(START, min(START + SEGMENT, COLUMNS), BLOCK_K):
        w = _weight_tile(rows, row_mask, k, COLUMNS, EVEN, FORMAT, PIN, BLOCK_K)
        x = _token_tile(tokens[0], token_mask, k, COLUMNS, EVEN, SCALED, PIN, BLOCK_K)
        chain = _multiply(w, x, tl.zeros((BLOCK_M, BLOCK_N), tl.float32))
        group = k // BLOCK_K
        if SCALED:
            scale = tl.load(tokens[1] + group, mask=token_mask, other=0)[None, :]
        else:
            scale = tl.load(rows[1] + group, mask=row_mask, other=0)[:, None]
        acc = fma32(chain, tl.broadcast_to(scale, (BLOCK_M, BLOCK_N)), acc)
    return acc


@triton.jit
def project(
    rows,
    row_mask,
    tokens,
    token_mask,
    COLUMNS: tl.constexpr,
    SEGMENT: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALED: tl.constexpr,
    PIN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Float32 accumulators [M, N] before the epilogue.

    rows: what weight_rows gave, for M rows. tokens: pointers [N] to values bfloat16 or codes uint8,
    and (SCALED) to their scales. SEGMENT: k of a segment, COLUMNS where there is one.
    """
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    one = tl.full((BLOCK_M, BLOCK_N), 1.0, tl.float32)
    for start in tl.static_range(0, COLUMNS, SEGMENT):
        if SCALED or FORMAT == "fp8":
            acc = _chains_of_128(
                rows, row_mask, tokens, token_mask, start, COLUMNS, SEGMENT,
                FORMAT, SCALED, PIN, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        else:
            acc = _chain(
                rows, row_mask, tokens, token_mask, start, COLUMNS, SEGMENT,
                FORMAT, PIN, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        # An addition would be folded into the matrix unit where a segment is one dot.
        total = acc if COLUMNS <= SEGMENT else fma32(acc, one, total)
    return total
