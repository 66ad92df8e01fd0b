"""The dots of contract section 4: tiles of 4 weight rows by 1 or 4 tokens, 16 lanes each.

A tile walks k once. Lane j of each (row, token) takes k = j, j + 16, ... with a multiply and an
add (two roundings); at the end of a chain the 16 lanes are added as a fixed tree, and total =
fma(chain, scale, total). The scale is the token's scale of class `a8`; everywhere else it is 1,
and then that fma is the add of two segments. So one tile serves routed experts (`a16`: one chain),
`a8` (chains of 128), and dense parts (segments of 4096).

Weights are read as packed bytes and decoded in registers. Tiles are compiled once a process, when
first used, and called by address.
"""

from collections.abc import Callable
from functools import cache

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from exactmoe.kernels.cpu.compile import entry
from exactmoe.kernels.cpu.vectors import (
    F32,
    I64,
    LANES,
    LANES_F32,
    bf16,
    e2m1,
    fma,
    load,
    shuffle,
    splat,
    store,
    sums_of_lanes,
    table_entry,
)

ROWS = 4
TOKENS = (1, 4)
# Weight format: elements that one block scale covers, bits of an element, what reads 16 elements.
_BLOCK = {"nvfp4": 16, "mxfp4": 32, "bf16": 16, "f32": 16}
_BITS = {"nvfp4": 4, "mxfp4": 4, "bf16": 16, "f32": 32}
# Fields of `geometry`, int64: elements of k in all and in one chain; bytes from a chain's token
# scale to the next.
GEOMETRY = ("columns", "chain", "token_scale_step")


def _operand(
    builder: ir.IRBuilder, format: str, address: ir.Value, scale: ir.Value | None
) -> ir.Value:
    if format == "f32":
        return load(builder, address, LANES_F32, 4)
    if format == "bf16":
        return bf16(builder, address)
    return builder.fmul(e2m1(builder, address), scale)


def _emit(builder: ir.IRBuilder, format: str, num_tokens: int, arguments: list[ir.Value]) -> None:
    """The body of one tile; arguments as in `call_tile`, without the function."""
    rows, row_scales, table, tokens, token_scales, geometry, out = arguments
    packed = format in ("nvfp4", "mxfp4")
    cells = ROWS * num_tokens

    def constant(value: int) -> ir.Constant:
        return ir.Constant(I64, value)

    def entry_of(array: ir.Value, index: int) -> ir.Value:
        return load(builder, builder.add(array, constant(8 * index)), I64, 8)

    row_of = [entry_of(rows, r) for r in range(ROWS)]
    row_scale_of = [entry_of(row_scales, r) for r in range(ROWS)] if packed else []
    token_of = [entry_of(tokens, t) for t in range(num_tokens)]
    token_scale_of = [entry_of(token_scales, t) for t in range(num_tokens)]
    columns, chain, scale_step = (entry_of(geometry, i) for i in range(len(GEOMETRY)))

    lanes = [cgutils.alloca_once(builder, LANES_F32) for _ in range(cells)]
    total = cgutils.alloca_once(builder, ir.VectorType(F32, cells))
    start = cgutils.alloca_once_value(builder, constant(0))
    scale_offset = cgutils.alloca_once_value(builder, constant(0))
    builder.store(ir.Constant(total.type.pointee, [0.0] * cells), total)

    block = constant(_BLOCK[format])
    steps_per_block = _BLOCK[format] // LANES

    def block_step(k: ir.Value) -> None:
        scales: list[ir.Value | None] = [None] * ROWS
        if packed:
            offset = builder.udiv(k, block)
            scales = [
                splat(builder, table_entry(builder, table, builder.add(a, offset)))
                for a in row_scale_of
            ]
        for step in range(steps_per_block):
            here = builder.add(k, constant(step * LANES))
            code_offset = builder.lshr(builder.mul(here, constant(_BITS[format])), constant(3))
            operands = [
                _operand(builder, format, builder.add(row_of[r], code_offset), scales[r])
                for r in range(ROWS)
            ]
            token_offset = builder.shl(here, constant(2))
            for t in range(num_tokens):
                x = load(builder, builder.add(token_of[t], token_offset), LANES_F32, 4)
                for r in range(ROWS):
                    cell = lanes[t * ROWS + r]
                    product = builder.fmul(operands[r], x)
                    builder.store(builder.fadd(builder.load(cell), product), cell)

    with cgutils.loop_nest(builder, [_ceil_div(builder, columns, chain)], I64):
        for cell in lanes:
            builder.store(ir.Constant(LANES_F32, [0.0] * LANES), cell)
        first = builder.load(start)
        left = builder.sub(columns, first)
        length = builder.select(builder.icmp_unsigned("<", left, chain), left, chain)
        with cgutils.for_range(builder, builder.udiv(length, block)) as loop:
            block_step(builder.add(first, builder.mul(loop.index, block)))
        sums = sums_of_lanes(builder, [builder.load(cell) for cell in lanes])
        offset = builder.load(scale_offset)
        token_scale = _per_token(
            builder, [load(builder, builder.add(a, offset), F32, 4) for a in token_scale_of]
        )
        builder.store(fma(builder, sums, token_scale, builder.load(total)), total)
        builder.store(builder.add(first, length), start)
        builder.store(builder.add(offset, scale_step), scale_offset)
    store(builder, builder.load(total), out)


def _ceil_div(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    return builder.udiv(builder.add(a, builder.sub(b, ir.Constant(I64, 1))), b)


def _per_token(builder: ir.IRBuilder, scales: list[ir.Value]) -> ir.Value:
    """Each token's scale once for each of its ROWS cells."""
    type_ = ir.VectorType(F32, len(scales))
    vector = ir.Constant(type_, ir.Undefined)
    for t, scale in enumerate(scales):
        vector = builder.insert_element(vector, scale, ir.Constant(ir.IntType(32), t))
    return shuffle(builder, vector, vector, [t for t in range(len(scales)) for _ in range(ROWS)])


@intrinsic(prefer_literal=True)
def _tile(typing, format, num_tokens, rows, row_scales, table, tokens, token_scales, geometry, out):
    format_value, num_tokens_value = format.literal_value, num_tokens.literal_value

    def generate(context, builder, signature, args):
        _emit(builder, format_value, num_tokens_value, list(args[2:]))
        return context.get_dummy_value()

    return types.void(format, num_tokens, *[types.int64] * 7), generate


SIGNATURE = "void(int64, int64, int64, int64, int64, int64, int64)"


def tile_source(format: str, num_tokens: int) -> Callable:
    """The function that numba compiles to a tile of ROWS rows by num_tokens (1 or 4) tokens."""

    def body(rows, row_scales, table, tokens, token_scales, geometry, out):
        _tile(format, num_tokens, rows, row_scales, table, tokens, token_scales, geometry, out)

    return body


@cache
def tile(format: str, num_tokens: int) -> Callable:
    """The compiled tile of a weight format by num_tokens tokens."""
    return entry(SIGNATURE)(tile_source(format, num_tokens))


def tile_address(format: str, num_tokens: int) -> int:
    """Where the machine code of a tile is, for `call_tile`."""
    return tile(format, num_tokens).address
