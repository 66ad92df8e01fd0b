"""What torch.compile sees of a layer: one custom operation, opaque to it.

Weights are no arguments of the operation. It finds its layer by a number in a weak table, so it
reads the weights that the layer has when it runs. The number is an attribute of the layer, guarded
by the compiled code: another layer, or a copy of one, has another number and is traced anew.
"""

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from exactmoe.errors import Unsupported

_FIRST_TORCH = Version("2.13")
_numbers = itertools.count(1)
_BLOCK, _EXPERTS = "_compiled_block", "_compiled_experts"


class Handle:
    """The number of one layer in the table, and the function that runs it eagerly.

    A copy of a layer, or an unpickled one, gets another number and is bound when it is traced.
    """

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.run: Callable[..., Tensor] | None = None
        self._owner: Callable[[], Any] | None = None

    def bind(self, owner: object, run: Callable[..., Tensor]) -> None:
        self.run, self._owner = run, weakref.ref(owner)
        _handles[self.number] = self

    @property
    def owner(self) -> Any:
        return None if self._owner is None else self._owner()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Handle":
        return Handle()

    def __reduce__(self) -> tuple[Any, ...]:
        return (Handle, ())


_handles: weakref.WeakValueDictionary[int, Handle] = weakref.WeakValueDictionary()


def _while_tracing(function: Callable[..., None]) -> Callable[..., None]:
    """The function runs while torch.compile traces, never in compiled code.

    This is what torch.compiler.assume_constant_result does. That decorator imports the whole
    tracer, which would take seconds of every start.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_while_tracing
def _require_tracer() -> None:
    """Refuse a torch whose tracer cannot hand a module to `_bind` (seen with 2.11)."""
    if Version(torch.__version__) < _FIRST_TORCH:
        raise Unsupported(
            f"torch is {torch.__version__}; allowed under torch.compile: {_FIRST_TORCH} and newer"
        )


@_while_tracing
def _bind(owner: Any, attribute: str, run: Callable[..., Tensor]) -> None:
    """Give `owner` a bound handle."""
    handle = owner.__dict__.get(attribute)
    if handle is None or (handle.owner is not None and handle.owner is not owner):
        handle = Handle()
        setattr(owner, attribute, handle)
    if handle.owner is None:
        handle.bind(owner, run)


@_while_tracing
def refuse_out(given: bool) -> None:
    """A traced call returns a tensor of its own."""
    if given:
        raise Unsupported("out was given under torch.compile; allowed: None")


def block(
    owner: Any,
    run: Callable[..., Tensor],
    x: Tensor,
    token_ids: Tensor | None,
    dtype: torch.dtype,
    columns: int | None = None,
) -> Tensor:
    """The traced form of run(owner, x) or, with ids, run(owner, x, token_ids).

    The result has x's shape, its last dimension `columns` where given, and `dtype`.

    Args:
        owner: a layer; it keeps a handle as an attribute.
        run: function of a module or class, which runs the layer without torch.compile.
    """
    _require_tracer()
    _bind(owner, _BLOCK, run)
    number, columns = getattr(owner, _BLOCK).number, x.shape[-1] if columns is None else columns
    return _block(x, token_ids, number, dtype, columns)  # type: ignore[no-any-return]


def experts(
    owner: Any,
    run: Callable[..., Tensor],
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """The traced form of run(owner, x, expert_ids, weights), as `block`."""
    _require_tracer()
    _bind(owner, _EXPERTS, run)
    number = getattr(owner, _EXPERTS).number
    return _experts(x, expert_ids, weights, number, dtype)  # type: ignore[no-any-return]


def _call(number: int, *tensors: Tensor | None) -> Tensor:
    handle = _handles.get(number)
    owner = None if handle is None else handle.owner
    if handle is None or handle.run is None or owner is None:
        raise Unsupported(
            f"compiled code asks for layer {number}, which is gone; allowed: code that was "
            "compiled in this process and whose layer is still there"
        )
    return handle.run(owner, *(tensor for tensor in tensors if tensor is not None))


@torch.library.custom_op("exactmoe::block", mutates_args=())
def _block(
    x: Tensor, token_ids: Tensor | None, number: int, dtype: torch.dtype, columns: int
) -> Tensor:
    return _call(number, x, token_ids)


@torch.library.custom_op("exactmoe::experts", mutates_args=())
def _experts(
    x: Tensor, expert_ids: Tensor, weights: Tensor, number: int, dtype: torch.dtype
) -> Tensor:
    return _call(number, x, expert_ids, weights)


@_block.register_fake
def _(x: Tensor, token_ids: Tensor | None, number: int, dtype: torch.dtype, columns: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], columns), dtype=dtype)


@_experts.register_fake
def _(x: Tensor, expert_ids: Tensor, weights: Tensor, number: int, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


def _refuse_gradients(*args: Any, **kwargs: Any) -> None:
    raise Unsupported(
        "the call needs gradients; this is inference only: run it under torch.no_grad()"
    )


# autograd asks for this only where an input requires a gradient.
_block.register_autograd(_refuse_gradients, setup_context=_refuse_gradients)
_experts.register_autograd(_refuse_gradients, setup_context=_refuse_gradients)
