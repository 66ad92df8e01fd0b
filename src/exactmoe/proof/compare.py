"""Bytes compared, and the first difference named (== lets +0 pass for -0 and fails equal NaNs)."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from exactmoe.errors import ConfigError

_AS_INTEGERS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}


@dataclass(frozen=True)
class Difference:
    """The first element at which two results differ.

    Attributes:
        dimension: what was varied, for example "neighbours".
        case: how, for example "block: NaN neighbours".
        width: tokens in the call that gave `found`.
        token: row of that call.
        element: column of that row.
        expected, found: the two values, as text (JSON has no NaN).
        expected_bits, found_bits: their bit patterns, for example "0x3F80".
    """

    dimension: str
    case: str
    width: int
    token: int
    element: int
    expected: str
    found: str
    expected_bits: str
    found_bits: str

    def __str__(self) -> str:
        return (
            f"{self.dimension} ({self.case}): width {self.width}, token {self.token}, "
            f"element {self.element}: expected {self.expected} ({self.expected_bits}), "
            f"found {self.found} ({self.found_bits})"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def bits(values: Tensor) -> Tensor:
    """The values' bytes as integers: bfloat16 as int16, float32 as int32, integers as they are."""
    if values.dtype in _AS_INTEGERS:
        return values.view(_AS_INTEGERS[values.dtype])
    if values.is_floating_point():
        raise ConfigError(f"values are {values.dtype}; allowed: bfloat16, float32, integers")
    return values


def same_bytes(expected: Tensor, found: Tensor) -> bool:
    """Whether two tensors of one shape and dtype have equal bytes."""
    return torch.equal(bits(expected), bits(found))


def first_difference(expected: Tensor, found: Tensor) -> tuple[int, int] | None:
    """(row, column) of the first element of [T, H] that differs in its bytes, or None."""
    different = (bits(expected) != bits(found)).nonzero()
    if different.numel() == 0:
        return None
    return int(different[0, 0]), int(different[0, 1])


def hexadecimal(value: Tensor) -> str:
    """The bit pattern of one value, for example 0x7FC0."""
    width = value.element_size() * 2
    return f"0x{int(bits(value)) & ((1 << 4 * width) - 1):0{width}X}"
