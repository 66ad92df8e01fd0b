"""Bits first: nothing is timed whose bytes are wrong."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from exactmoe.bench.problem import Selection
from exactmoe.bench.timing import Replay
from exactmoe.errors import BitMismatch


def require_equal(what: str, expected: Tensor, found: Tensor) -> None:
    """BitMismatch, with the first place, unless the bytes are equal."""
    different = (_bits(expected) != _bits(found)).nonzero()
    if different.numel():
        row, column = (int(place) for place in different[0])
        raise BitMismatch(
            f"{what}: token {row}, element {column} is {float(found[row, column])!r}; "
            f"expected {float(expected[row, column])!r}. Nothing was timed after it"
        )


def _bits(values: Tensor) -> Tensor:
    return values.view({2: torch.int16, 4: torch.int32}[values.element_size()])


def verify_widths(
    what: str, call: Callable[[Selection], Tensor], widest: Selection, widths: Sequence[int]
) -> None:
    """The first tokens of a call, alone, must have the bytes that they have in the widest one."""
    expected = call(widest).clone()
    for width in sorted(set(widths)):
        part = widest.first(width)
        require_equal(f"{what}, width {width}", expected[:width], call(part))


def verify_replay(what: str, replay: Replay, expected: Sequence[Tensor]) -> None:
    """A captured run must write every byte that an eager one wrote."""
    poison(replay)
    replay.run()
    for number, (eager, captured) in enumerate(zip(expected, replay.outputs, strict=True)):
        require_equal(f"{what}, captured, call {number}", eager, captured)


def poison(replay: Replay) -> None:
    """All outputs to NaN, so that an element that is not written is seen."""
    for output in replay.outputs:
        output.view(torch.uint8).fill_(0xFF)
