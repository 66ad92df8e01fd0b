"""LLVM vector code: 16 float32 lanes, whatever the machine's registers are; LLVM cuts to fit."""

from collections.abc import Sequence

from llvmlite import ir
from numba.core import cgutils

LANES = 16
I8, I16, I32, I64, F32 = (
    ir.IntType(8),
    ir.IntType(16),
    ir.IntType(32),
    ir.IntType(64),
    ir.FloatType(),
)
LANES_F32 = ir.VectorType(F32, LANES)
LANES_I32 = ir.VectorType(I32, LANES)
E2M1_ORDER = tuple(j // 2 + 8 * (j % 2) for j in range(LANES))  # what e2m1_avx512 has in lane j


def shuffle(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, lanes: Sequence[int]) -> ir.Value:
    """Lanes of a (numbered from 0) and b (numbered on from a's)."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes)))


def splat(builder: ir.IRBuilder, value: ir.Value, lanes: int = LANES) -> ir.Value:
    """The same value in every lane."""
    undefined = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    one = builder.insert_element(undefined, value, ir.Constant(I32, 0))
    return shuffle(builder, one, undefined, [0] * lanes)


def load(builder: ir.IRBuilder, address: ir.Value, type_: ir.Type, align: int) -> ir.Value:
    """What lies at an address (int64)."""
    return builder.load(builder.inttoptr(address, type_.as_pointer()), align=align)


def store(builder: ir.IRBuilder, value: ir.Value, address: ir.Value, align: int = 4) -> None:
    """Write a value to an address (int64)."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=align)


def e2m1_doubled(builder: ir.IRBuilder, address: ir.Value, steps: int) -> list[ir.Value]:
    """Twice the values of 16 x steps codes at an address, low nibble first, on any processor.

    Twice a magnitude of code m is m + max(m - 4, 0) + 2 max(m - 6, 0): bytes, no table. There is no
    subnormal on the way: a multiply of one takes a hundred times as long on x86. A code of -0 gives
    +0, which no sum can show.
    """
    size = 8 * steps
    bytes_ = load(builder, address, ir.VectorType(I8, size), 1)

    def all_of(like: ir.Value, value: int) -> ir.Constant:
        return ir.Constant(like.type, [value] * like.type.count)

    low = builder.and_(bytes_, all_of(bytes_, 15))
    high = builder.lshr(bytes_, all_of(bytes_, 4))
    codes = shuffle(builder, low, high, [j // 2 + size * (j % 2) for j in range(2 * size)])
    code = builder.and_(codes, all_of(codes, 7))

    def above(limit: int) -> ir.Value:
        type_ = ir.FunctionType(codes.type, [codes.type] * 2)
        name = f"llvm.usub.sat.v{codes.type.count}i8"
        function = cgutils.get_or_insert_function(builder.module, type_, name)
        return builder.call(function, [code, all_of(codes, limit)])

    over_six = above(6)
    twice = builder.add(builder.add(code, above(4)), builder.add(over_six, over_six))
    negative = builder.sext(builder.icmp_unsigned(">", codes, all_of(codes, 7)), codes.type)
    signed = builder.sub(builder.xor(twice, negative), negative)
    parts = [shuffle(builder, signed, signed, range(16 * i, 16 * i + 16)) for i in range(steps)]
    return [builder.sitofp(builder.sext(part, LANES_I32), LANES_F32) for part in parts]


def e2m1_avx512(
    builder: ir.IRBuilder, address: ir.Value, rows: Sequence[ir.Value]
) -> list[ir.Value]:
    """The operands of 16 codes for each address of a table's row, lanes in the order E2M1_ORDER.

    A row has the 16 codes' values times a block scale. The 8 bytes of 16 codes go to every 64-bit
    lane; after a shift the lower four bits of a 32-bit lane are its code, and those alone are what
    the permute reads. Three instructions for 16 operands, two of them loads, and no multiply.
    """
    type_ = ir.FunctionType(LANES_F32, [LANES_F32, LANES_I32])
    name = "llvm.x86.avx512.permvar.sf.512"
    permute = cgutils.get_or_insert_function(builder.module, type_, name)
    shifts = ir.Constant(LANES_I32, [4 * (j // 2) for j in range(LANES)])
    operands = []
    for i, row in enumerate(rows):
        codes = load(builder, builder.add(address, ir.Constant(I64, 8 * i)), I64, 1)
        everywhere = builder.bitcast(splat(builder, codes, LANES // 2), LANES_I32)
        values = load(builder, row, LANES_F32, 64)
        operands.append(builder.call(permute, [values, builder.lshr(everywhere, shifts)]))
    return operands


def bf16(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """16 bfloat16 at an address as float32."""
    halves = builder.zext(
        load(builder, address, ir.VectorType(I16, LANES), 2), ir.VectorType(I32, LANES)
    )
    return builder.bitcast(builder.shl(halves, ir.Constant(halves.type, [16] * LANES)), LANES_F32)


def e4m3(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """16 E4M3 bytes at an address as float32; no code is NaN.

    Sign, exponent and mantissa are moved to their places, and the exponent gets its new bias. Codes
    without an implicit one then read as (8 + m) / 8 x 2^-7 instead of m / 8 x 2^-6: twice that less
    2^-6, exact, with no subnormal on the way. A code of -0 gives +0, which no sum can show.
    """

    def all_of(value: int) -> ir.Constant:
        return ir.Constant(LANES_I32, [value] * LANES)

    wide = builder.zext(load(builder, address, ir.VectorType(I8, LANES), 1), LANES_I32)
    spread = builder.ashr(builder.shl(wide, all_of(24)), all_of(4))
    placed = builder.and_(spread, all_of(0x87F00000))
    normal = builder.bitcast(builder.add(placed, all_of((127 - 7) << 23)), LANES_F32)
    sign = builder.and_(placed, all_of(0x80000000))
    step = builder.bitcast(builder.or_(sign, all_of((127 - 6) << 23)), LANES_F32)
    small = builder.fsub(builder.fadd(normal, normal), step)
    exponent = builder.and_(wide, all_of(0x78))
    return builder.select(builder.icmp_unsigned("==", exponent, all_of(0)), small, normal)


def table_rows(
    builder: ir.IRBuilder, table: ir.Value, address: ir.Value, count: int
) -> list[ir.Value]:
    """The addresses table + 64 x byte of `count` bytes (a power of two, at most 8)."""
    word = load(builder, address, ir.IntType(8 * count), 1)
    wide = builder.zext(word, I64) if count < 8 else word
    rows = []
    for i in range(count):
        amount = ir.Constant(I64, abs(8 * i - 6))
        shifted = builder.shl(wide, amount) if i == 0 else builder.lshr(wide, amount)
        rows.append(builder.add(table, builder.and_(shifted, ir.Constant(I64, 0xFF << 6))))
    return rows


def sums_of_lanes(builder: ir.IRBuilder, vectors: Sequence[ir.Value]) -> ir.Value:
    """The sum of each vector's 16 lanes, j + (j + 8), then +4, +2, +1, as one vector in the order
    given.

    The number of vectors is a power of two, at most 16. Several are folded side by side, so that
    each add works on full registers; the additions of one sum, and their order, stay the same.
    """
    items, width = 1, LANES
    current = list(vectors)
    while width > 1:
        half = width // 2
        low = [item * width + lane for item in range(items) for lane in range(half)]
        if len(current) == 1:
            parts = [(current[0], current[0], low)]
        else:
            both = low + [items * width + lane for lane in low]
            pairs = zip(current[0::2], current[1::2], strict=True)
            parts = [(a, b, both) for a, b in pairs]
            items *= 2
        current = [
            builder.fadd(
                shuffle(builder, a, b, lanes),
                shuffle(builder, a, b, [lane + half for lane in lanes]),
            )
            for a, b, lanes in parts
        ]
        width = half
    return current[0]


def fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """a x b + c of vectors of float32, one rounding in each lane."""
    type_ = ir.FunctionType(a.type, [a.type] * 3)
    function = cgutils.get_or_insert_function(builder.module, type_, f"llvm.fma.v{a.type.count}f32")
    return builder.call(function, [a, b, c])


def prefetch(builder: ir.IRBuilder, address: ir.Value) -> None:
    """Ask for the cache line of an address, which may lie anywhere."""
    pointer = builder.inttoptr(address, I8.as_pointer())
    type_ = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, type_, "llvm.prefetch.p0")
    builder.call(function, [pointer, *(ir.Constant(I32, v) for v in (0, 3, 1))])
