"""The dots of contract section 4: tiles of 4 weight rows by 1, 2 or 4 tokens, 16 lanes each.

A tile walks k once. Lane j of each (row, token) takes k = j, j + 16, ... with a multiply and an add
(two roundings); at the end of a chain the 16 lanes are added as a fixed tree, and total =
fma(chain, scale, total). The scale is the token's scale of class `a8`; everywhere else it is 1, and
then that fma is the add of two segments. So one tile serves routed experts (`a16`: one chain), `a8`
(chains of 128), and dense parts (segments of 4096).

FP8 blocks cut each of these chains once more: per 128 of k, sum = fma(16 lanes, the row's block
scale, sum), from +0.

A fused tile does the multiply and the add as one fma. Where every product is exact in float32 that
is the same number, and half the work; exact.py says where that is.

Weights are read as packed bytes and decoded in registers. Tiles are compiled once a process, when
first used, and called by address.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from exactmoe.kernels.cpu.compile import entry
from exactmoe.kernels.cpu.vectors import (
    E2M1_ORDER,
    F32,
    I64,
    LANES,
    LANES_F32,
    bf16,
    e2m1_avx512,
    e2m1_doubled,
    e4m3,
    fma,
    load,
    prefetch,
    shuffle,
    splat,
    store,
    sums_of_lanes,
    table_rows,
)

ROWS = 4
TOKENS = (1, 2, 4)
FORMATS = ("nvfp4", "mxfp4", "bf16", "fp8", "f32")
SIGNATURE = "void(int64, int64, int64, int64, int64, int64, int64)"
# Fields of `geometry`, int64: elements of k in all and in one chain; bytes between token scales.
GEOMETRY = ("columns", "chain", "token_scale_step")
_STEP_BYTES = {"nvfp4": 8, "mxfp4": 8, "bf16": 32, "fp8": 16, "f32": 64}  # bytes of 16 elements
_BLOCK_STEPS = {"nvfp4": 1, "mxfp4": 2}  # steps of 16 elements that share a block scale
_FP8_BLOCK_STEPS = 8  # and as many that share the scale of an fp8 block
_CACHE_LINE = 64


@dataclass(frozen=True)
class _Emitter:
    """Writes the body of one tile. The addresses are LLVM values, int64."""

    builder: ir.IRBuilder
    format: str
    num_tokens: int
    fused: bool
    avx512: bool
    rows: list[ir.Value]
    row_scales: list[ir.Value]
    table: ir.Value
    ahead: ir.Value
    tokens: list[ir.Value]
    cells: list[ir.Value]

    @property
    def block_steps(self) -> int:
        """Steps that share a block scale of a packed format; 0 for the others."""
        return _BLOCK_STEPS.get(self.format, 0)

    @property
    def looked_up(self) -> bool:
        """Whether operands come from a table, in the lane order E2M1_ORDER."""
        return self.avx512 and self.block_steps > 0

    @property
    def unroll(self) -> int:
        return 4 if self.looked_up else 2

    def prefetch_rows(self, step: ir.Value, count: int) -> None:
        """Ask for as many bytes of the next tile's rows as `count` steps of this one read."""
        builder, size = self.builder, _STEP_BYTES[self.format]
        if not self.block_steps:
            offset = builder.add(builder.mul(step, ir.Constant(I64, size)), self.ahead)
            for row in self.rows:
                prefetch(builder, builder.add(row, offset))
            return
        # Rows that follow each other are one piece of memory: each line of it is asked for once.
        offset = builder.add(builder.mul(step, ir.Constant(I64, size * ROWS)), self.ahead)
        first = builder.add(self.rows[0], offset)
        for place in range(0, count * size * ROWS, _CACHE_LINE):
            prefetch(builder, builder.add(first, ir.Constant(I64, place)))

    def operands(self, row: int, step: ir.Value, count: int) -> list[ir.Value]:
        """`count` vectors of 16 operands of a row."""
        builder, size = self.builder, _STEP_BYTES[self.format]
        at = builder.add(self.rows[row], builder.mul(step, ir.Constant(I64, size)))
        if self.block_steps:
            return self.scaled(row, at, step, count)
        places = [builder.add(at, ir.Constant(I64, size * i)) for i in range(count)]
        if self.format == "bf16":
            return [bf16(builder, place) for place in places]
        if self.format == "fp8":
            return [e4m3(builder, place) for place in places]
        return [load(builder, place, LANES_F32, 4) for place in places]

    def scaled(self, row: int, at: ir.Value, step: ir.Value, count: int) -> list[ir.Value]:
        """Operands of a packed format: its codes lie at `at`."""
        builder, per_scale = self.builder, self.block_steps
        block = builder.udiv(step, ir.Constant(I64, per_scale))
        place = builder.add(self.row_scales[row], block)
        blocks = table_rows(builder, self.table, place, count // per_scale)
        rows = [blocks[i // per_scale] for i in range(count)]
        if self.looked_up:
            return e2m1_avx512(builder, at, rows)
        # The value of code 1 is half the scale; exact, for a scale over a code that is not zero is
        # at least 2^-96.
        halves = [load(builder, builder.add(row, ir.Constant(I64, 4)), F32, 4) for row in rows]
        doubled = e2m1_doubled(builder, at, count)
        return [
            builder.fmul(value, splat(builder, half))
            for value, half in zip(doubled, halves, strict=True)
        ]

    def steps(self, step: ir.Value, count: int) -> None:
        """Add the products of `count` x 16 elements to every cell, k ascending."""
        builder = self.builder
        self.prefetch_rows(step, count)
        operands = [self.operands(r, step, count) for r in range(ROWS)]
        for i in range(count):
            offset = builder.shl(builder.add(step, ir.Constant(I64, i)), ir.Constant(I64, 6))
            for t, token in enumerate(self.tokens):
                x = load(builder, builder.add(token, offset), LANES_F32, 4)
                if self.looked_up:
                    x = shuffle(builder, x, x, E2M1_ORDER)
                for r in range(ROWS):
                    cell = self.cells[t * ROWS + r]
                    old, w = builder.load(cell), operands[r][i]
                    if self.fused:
                        new = fma(builder, w, x, old)
                    else:
                        new = builder.fadd(old, builder.fmul(w, x))
                    builder.store(new, cell)

    def chain(self, first: ir.Value, length: ir.Value) -> ir.Value:
        """The sums of one chain, a vector of float32 in the order of the cells; counts of steps."""
        if self.format != "fp8":
            return self.lanes(first, length)
        builder, block_steps = self.builder, ir.Constant(I64, _FP8_BLOCK_STEPS)
        zeros = ir.Constant(ir.VectorType(F32, len(self.cells)), [0.0] * len(self.cells))
        total = cgutils.alloca_once(builder, zeros.type)
        builder.store(zeros, total)
        with cgutils.for_range(builder, _ceil_div(builder, length, block_steps)) as loop:
            done = builder.mul(loop.index, block_steps)
            start, left = builder.add(first, done), builder.sub(length, done)
            sums = self.lanes(start, _minimum(builder, left, block_steps))
            offset = builder.shl(builder.udiv(start, block_steps), ir.Constant(I64, 2))
            places = [builder.add(row, offset) for row in self.row_scales]
            scales = [load(builder, place, F32, 4) for place in places]
            scale = _scale_cells(builder, scales, [c % ROWS for c in range(len(self.cells))])
            builder.store(fma(builder, sums, scale, builder.load(total)), total)
        return builder.load(total)

    def lanes(self, first: ir.Value, length: ir.Value) -> ir.Value:
        """The sums of the 16 lanes over some steps, a vector in the order of the cells."""
        builder = self.builder
        for cell in self.cells:
            builder.store(ir.Constant(LANES_F32, [0.0] * LANES), cell)
        self.repeat(first, length, self.unroll)
        left = builder.urem(length, ir.Constant(I64, self.unroll))
        self.repeat(builder.add(first, builder.sub(length, left)), left, max(self.block_steps, 1))
        sums = [builder.load(cell) for cell in self.cells]
        if self.looked_up:
            back = [E2M1_ORDER.index(j) for j in range(LANES)]
            sums = [shuffle(builder, lanes, lanes, back) for lanes in sums]
        return sums_of_lanes(builder, sums)

    def repeat(self, first: ir.Value, length: ir.Value, count: int) -> None:
        """`count` steps at a time, as often as `length` has room for them."""
        builder, size = self.builder, ir.Constant(I64, count)
        with cgutils.for_range(builder, builder.udiv(length, size)) as loop:
            self.steps(builder.add(first, builder.mul(loop.index, size)), count)


def _emit(
    builder: ir.IRBuilder, format: str, num_tokens: int, modes: tuple[bool, bool], arguments: list
) -> None:
    """The body of one tile; modes: (fused, avx512); arguments: those of `call_tile` but one."""
    rows, row_scales, table, tokens, token_scales, geometry, out = arguments

    def entries(array: ir.Value, count: int) -> list[ir.Value]:
        places = [builder.add(array, ir.Constant(I64, 8 * i)) for i in range(count)]
        return [load(builder, place, I64, 8) for place in places]

    num_cells = ROWS * num_tokens
    row_entries = entries(rows, ROWS)
    ahead = builder.mul(builder.sub(row_entries[1], row_entries[0]), ir.Constant(I64, ROWS))
    emitter = _Emitter(
        builder,
        format,
        num_tokens,
        *modes,
        rows=row_entries,
        row_scales=entries(row_scales, ROWS),
        table=table,
        ahead=ahead,
        tokens=entries(tokens, num_tokens),
        cells=[cgutils.alloca_once(builder, LANES_F32) for _ in range(num_cells)],
    )
    columns, chain_columns, scale_step = entries(geometry, len(GEOMETRY))
    shift = ir.Constant(I64, LANES.bit_length() - 1)
    num_steps, chain_steps = builder.lshr(columns, shift), builder.lshr(chain_columns, shift)
    scale_places = entries(token_scales, num_tokens)

    total = cgutils.alloca_once_value(
        builder, ir.Constant(ir.VectorType(F32, num_cells), [0.0] * num_cells)
    )
    first = cgutils.alloca_once_value(builder, ir.Constant(I64, 0))
    with cgutils.for_range(builder, _ceil_div(builder, num_steps, chain_steps)) as loop:
        start = builder.load(first)
        length = _minimum(builder, builder.sub(num_steps, start), chain_steps)
        sums = emitter.chain(start, length)
        offset = builder.mul(loop.index, scale_step)
        scales = [load(builder, builder.add(place, offset), F32, 4) for place in scale_places]
        scale = _scale_cells(builder, scales, [cell // ROWS for cell in range(num_cells)])
        builder.store(fma(builder, sums, scale, builder.load(total)), total)
        builder.store(builder.add(start, length), first)
    store(builder, builder.load(total), out)


def _ceil_div(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    return builder.udiv(builder.add(a, builder.sub(b, ir.Constant(I64, 1))), b)


def _minimum(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    return builder.select(builder.icmp_unsigned("<", a, b), a, b)


def _scale_cells(builder: ir.IRBuilder, scales: list[ir.Value], cells: Sequence[int]) -> ir.Value:
    """A vector with scales[i] where `cells`, in the order of the cells, has i."""
    vector = ir.Constant(ir.VectorType(F32, len(scales)), ir.Undefined)
    for i, scale in enumerate(scales):
        vector = builder.insert_element(vector, scale, ir.Constant(ir.IntType(32), i))
    return shuffle(builder, vector, vector, cells)


@intrinsic(prefer_literal=True)
def _tile(typing, format, num_tokens, fused, arguments):
    """The body of one tile; arguments: a tuple of the addresses that `call_tile` is given."""

    def generate(context, builder, signature, args):
        features = context.codegen().magic_tuple()[2]
        modes = (bool(fused.literal_value), "+avx512bw" in features)
        addresses = cgutils.unpack_tuple(builder, args[3])
        _emit(builder, format.literal_value, num_tokens.literal_value, modes, addresses)
        return context.get_dummy_value()

    return types.void(format, num_tokens, fused, arguments), generate


def tile_source(format: str, num_tokens: int, fused: bool) -> Callable:
    """The function that numba compiles to a tile of ROWS rows by num_tokens tokens."""
    mode = int(fused)

    def body(rows, row_scales, table, tokens, token_scales, geometry, out):
        arguments = (rows, row_scales, table, tokens, token_scales, geometry, out)
        _tile(format, num_tokens, mode, arguments)

    return body


@cache
def tile(format: str, num_tokens: int, fused: bool) -> Callable:
    """The compiled tile of a weight format by num_tokens tokens."""
    return entry(SIGNATURE)(tile_source(format, num_tokens, fused))


def tile_address(format: str, num_tokens: int, fused: bool = False) -> int:
    """Where the machine code of a tile is, for `call_tile`."""
    return tile(format, num_tokens, fused).address
