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
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_VALUES = ir.Constant(LANES_F32, [*_E2M1, *(-m for m in _E2M1)])


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


def e2m1(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """The 16 values of the 8 bytes at an address: lane j is nibble j, the low nibble first.

    LLVM turns the chain of extracts into one permute of a register; there is no table in memory,
    and no subnormal on the way (a multiply of one takes a hundred times as long on x86).
    """
    halves = load(builder, address, ir.VectorType(I32, 2), 1)
    words = shuffle(builder, halves, halves, [0] * 8 + [1] * 8)
    codes = builder.lshr(words, ir.Constant(words.type, [4 * j for j in range(8)] * 2))
    codes = builder.and_(codes, ir.Constant(words.type, [15] * LANES))
    values = ir.Constant(LANES_F32, ir.Undefined)
    for j in range(LANES):
        lane = ir.Constant(I32, j)
        value = builder.extract_element(_E2M1_VALUES, builder.extract_element(codes, lane))
        values = builder.insert_element(values, value, lane)
    return values


def bf16(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """16 bfloat16 at an address as float32."""
    halves = builder.zext(
        load(builder, address, ir.VectorType(I16, LANES), 2), ir.VectorType(I32, LANES)
    )
    return builder.bitcast(builder.shl(halves, ir.Constant(halves.type, [16] * LANES)), LANES_F32)


def table_entry(builder: ir.IRBuilder, table: ir.Value, address: ir.Value) -> ir.Value:
    """table[byte at address] as float32; table is the address of 256 float32."""
    byte = builder.zext(load(builder, address, I8, 1), I64)
    return load(builder, builder.add(table, builder.shl(byte, ir.Constant(I64, 2))), F32, 4)


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
