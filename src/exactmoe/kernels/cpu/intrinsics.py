"""Single operations that numba has no spelling for: fma, views of bits, calls by address."""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from exactmoe.kernels.cpu.compile import device

I32, I64, F32, F64 = ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.DoubleType()


@intrinsic
def fma32(typing, a, b, c):
    """a x b + c in float32 with one rounding."""

    def generate(context, builder, signature, args):
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), generate


def _bitcast(source, target, llvm_type):
    def typed(typing, value):
        def generate(context, builder, signature, args):
            return builder.bitcast(args[0], llvm_type)

        return target(source), generate

    return typed


bits32 = intrinsic(_bitcast(types.float32, types.uint32, I32))
float32_of = intrinsic(_bitcast(types.uint32, types.float32, F32))
float64_of = intrinsic(_bitcast(types.int64, types.float64, F64))


@intrinsic
def call_tile(typing, function, rows, row_scales, table, tokens, token_scales, geometry, out):
    """Call a tile of dot.py by its address. All arguments are addresses."""

    def generate(context, builder, signature, args):
        type_ = ir.FunctionType(ir.VoidType(), [I64] * 7)
        builder.call(builder.inttoptr(args[0], type_.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), generate


@intrinsic
def fetch_add(typing, address, amount):
    """Add to the int64 at an address, atomically; gives the value before."""

    def generate(context, builder, signature, args):
        return builder.atomic_rmw(
            "add", builder.inttoptr(args[0], I64.as_pointer()), args[1], "monotonic"
        )

    return types.int64(types.int64, types.int64), generate


@device
def next_piece(counter):
    """The next piece of work that no thread has taken; counter int64 [1] is shared by them."""
    return fetch_add(counter.ctypes.data, 1)
