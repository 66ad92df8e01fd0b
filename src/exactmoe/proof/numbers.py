"""Test numbers from an integer hash that is written out here: no library's random generator.

The same numbers come out on every machine, device and version, so answers can be stored in a file.
They are made on `device` (default: the CPU): wide calls of a GPU's layer would take seconds there.
"""

import torch
from torch import Tensor

from exactmoe.formats.scales import power_of_two

Device = torch.device | None

_MASK = 0xFFFFFFFF
_STREAM_STEP = 0x9E3779B9
_POWERS = 0x10000000  # streams that no caller counts up to


def words(shape: tuple[int, ...], stream: int, device: Device = None) -> Tensor:
    """Well mixed 32-bit words as int64 of this shape; streams are independent of each other.

    The mixer is "lowbias32" (C. Wellons, hash-prospector): shifts, multiplications modulo 2^32.
    """
    count = 1
    for size in shape:
        count *= size
    start = _mix(stream * _STREAM_STEP & _MASK)
    value = (torch.arange(count, dtype=torch.int64, device=device or "cpu") + start) & _MASK
    return _mixed(value).view(shape)


def _mixed(value: Tensor) -> Tensor:
    value = value ^ (value >> 16)
    value = (value * 0x7FEB352D) & _MASK
    value = value ^ (value >> 15)
    value = (value * 0x846CA68B) & _MASK
    return value ^ (value >> 16)


def _mix(value: int) -> int:
    return int(_mixed(torch.tensor([value], dtype=torch.int64, device="cpu")))


def integers(
    shape: tuple[int, ...], stream: int, low: int, high: int, device: Device = None
) -> Tensor:
    """Int64 from low to high, both included."""
    return low + words(shape, stream, device) % (high - low + 1)


def bells(shape: tuple[int, ...], stream: int, device: Device = None) -> Tensor:
    """Float32 shaped like a normal distribution of deviation 1: four bytes added, exact in float32.

    A byte has deviation 73.9, four of them 147.8; the divisor 128 keeps every value exact.
    """
    word = words(shape, stream, device)
    total = (word & 255) + (word >> 8 & 255) + (word >> 16 & 255) + (word >> 24)
    return (total - 510).float() / 128.0


def wide(shape: tuple[int, ...], stream: int, device: Device = None) -> Tensor:
    """Float32 of deviation about 1 over thirteen binades: bells x 2^-10 ... 2^2.

    Numbers of one size add without rounding for a while, and then show no order of a sum.
    """
    powers = integers(shape, stream + _POWERS, -10, 2, device)
    return bells(shape, stream, device) * power_of_two(powers)


def units(shape: tuple[int, ...], stream: int, device: Device = None) -> Tensor:
    """Float32 in (0, 1], multiples of 2^-24."""
    return ((words(shape, stream, device) >> 8) + 1).float() / float(1 << 24)


def permutations(rows: int, size: int, stream: int, device: Device = None) -> Tensor:
    """Int64 [rows, size]: each row a permutation of 0 ... size - 1."""
    return torch.argsort(words((rows, size), stream, device), dim=1, stable=True)
