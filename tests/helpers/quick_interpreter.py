"""Triton's interpreter without what it computes again for every operation and never looks at.

A program of a kernel is thousands of operations on small arrays; most of its time went into types
that were there already. Nothing here changes a value: types are kept instead of made anew, and
overflows of integers are not computed, since the interpreter looks at them in debug mode only.
"""

import dataclasses
from math import prod
from typing import Any


def quicken() -> None:
    """Change triton's modules; call it once, before anything is interpreted."""
    from triton import language
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    _keep_types(language, interpreter.InterpreterBuilder)
    _keep_shapes(language)
    _keep_numpy_types(language, interpreter)
    _leave_equal_shapes(interpreter.TritonSemantic)


def _keep_types(language: Any, builder: Any) -> None:
    """One block type for each element type and shape; pointers have no hash, and are made anew."""
    block_type, scalar_type = language.block_type, language.dtype
    kept: dict[tuple[str, tuple[int, ...]], Any] = {}

    def block(element: Any, shape: Any) -> Any:
        if type(element) is not scalar_type:
            return block_type(element, shape)
        key = element.name, tuple(shape)
        found = kept.get(key)
        if found is None:
            found = kept[key] = block_type(element, shape)
        return found

    equal = scalar_type.__eq__
    scalar_type.__eq__ = lambda self, other: self is other or equal(self, other)
    block_type.with_element_ty = lambda self, element: block(element, self.shape)
    builder.get_block_ty = lambda self, element, shape: block(element, shape)


def _keep_shapes(language: Any) -> None:
    """The constants of a tensor's shape belong to its type."""
    core = language.core

    def __init__(self: Any, handle: Any, type: Any) -> None:
        kept = type.__dict__.get("_kept")
        if kept is None:
            shape = type.shape if type.is_block() else ()
            constants = core.tuple([core.constexpr(size) for size in shape])
            kept = type._kept = (constants, core.constexpr(prod(shape)), type.scalar)
        self.handle, self.type = handle, type
        self.shape, self.numel, self.dtype = kept

    core.tensor.__init__ = __init__


def _keep_numpy_types(language: Any, interpreter: Any) -> None:
    """The table of numpy's types was written anew for every array."""
    make, kept = interpreter._get_np_dtype, {}

    def numpy_type(type: Any) -> Any:
        element = type.element_ty if isinstance(type, language.block_type) else type
        found = kept.get(element.name)
        if found is None:
            found = kept[element.name] = make(type)
        return found

    interpreter._get_np_dtype = numpy_type


def _leave_equal_shapes(semantic: Any) -> None:
    """Operands of one shape, most of them, are broadcast to what they are."""
    broadcast = semantic.broadcast_impl_value

    def broadcast_impl_value(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
        if _sizes(left.type) == _sizes(right.type):
            return left, right
        return broadcast(self, left, right)

    semantic.broadcast_impl_value = broadcast_impl_value


def _sizes(type: Any) -> tuple[int, ...]:
    found = type.__dict__.get("_sizes")
    if found is None:
        found = type._sizes = tuple(type.shape) if type.is_block() else ()
    return found
