"""Ceilings of a machine, measured in the same run: how fast it reads memory and multiplies.

The floor of a call is the larger of two times: to read the bytes that it must, and to do its
multiplications at the rate of the machine's library.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from exactmoe.bench.timing import Timer

GIB = 2**30
ROTATED = 8
# int32 in 128 KiB: each tile of the read kernel cuts it evenly.
_GRANULE = 32768
_MATRIX_SIZE = {"cuda": 8192, "cpu": 1024}


class Reader(Protocol):
    """Measures reads."""

    bytes_per_us: float

    def segments_us(self, count: int) -> float:
        """Microseconds to read `count` experts' bytes, each in one piece, at random places."""


class CardReader:
    """Reads with the kernel of ops/triton/read_memory.py, the fastest of its tiles.

    Args:
        num_segments: experts.
        segment_bytes: bytes of one expert.
    """

    def __init__(
        self, device: torch.device, num_segments: int, segment_bytes: float, timer: Timer
    ) -> None:
        # Triton is needed on a card only.
        from exactmoe.ops.triton.read_memory import READ_TILES, read_segments

        free, _ = torch.cuda.mem_get_info(device)
        granules = max(1, round(segment_bytes / 4) // _GRANULE)
        self._elements = granules * _GRANULE
        self._ratio = segment_bytes / (4 * self._elements)
        self._num_segments = num_segments
        whole = int(min(4 * GIB, free // 2)) // 4 // _GRANULE * _GRANULE
        size = max(whole, num_segments * self._elements)
        self._memory = torch.randint(-(2**31), 2**31 - 1, (size,), dtype=torch.int32, device=device)
        self._timer, self._read = timer, read_segments
        start = torch.zeros(1, dtype=torch.int64, device=device)
        times = {}
        for tile in READ_TILES:
            call = _bound(read_segments, self._memory, start, whole, tile)
            call()
            times[tile] = timer.capture([call]).time().us
        self._tile = min(times, key=lambda tile: times[tile])
        self.bytes_per_us = 4 * whole / times[self._tile]

    def segments_us(self, count: int) -> float:
        calls = []
        for _ in range(ROTATED):
            chosen = torch.randperm(self._num_segments, device=self._memory.device)[:count]
            starts = chosen * self._elements
            calls.append(_bound(self._read, self._memory, starts, self._elements, self._tile))
        calls[0]()
        return self._timer.capture(calls).time().us * self._ratio


class ClockReader:
    """Reads with torch's sum, on a CPU."""

    def __init__(self, segment_bytes: float, timer: Timer, nbytes: int = GIB // 4) -> None:
        memory = torch.randint(-(2**31), 2**31 - 1, (nbytes // 8,), dtype=torch.int64)
        self._segment_bytes = segment_bytes
        self.bytes_per_us = nbytes / timer.capture([memory.sum]).time().us

    def segments_us(self, count: int) -> float:
        return count * self._segment_bytes / self.bytes_per_us


def _bound(function: Callable[..., torch.Tensor], *arguments: object) -> Callable[[], torch.Tensor]:
    return lambda: function(*arguments)


def flops_per_us(device: torch.device, dtype: torch.dtype, timer: Timer) -> float:
    """The rate of a large square product: bfloat16 or float8_e4m3fn (cuBLAS), float32 (a CPU)."""
    size = _MATRIX_SIZE[device.type]
    left, right = (torch.randn(size, size, device=device) for _ in range(2))
    if dtype == torch.float8_e4m3fn:
        one = torch.ones((), device=device)
        a, b = left.to(dtype), right.to(dtype).t()
        # torch has no other way to call cuBLAS in fp8 in the versions that are supported.
        call = _bound(
            lambda: torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        )
    else:
        call = _bound(torch.mm, left.to(dtype), right.to(dtype))
    call()
    return 2 * size**3 / timer.capture([call] * 2).time().us


@dataclass
class Ceilings:
    """Rates of one machine, and the floors that follow.

    Attributes:
        reader: of memory.
        matrix_rate: floating-point operations a microsecond.
        matrix_type: of the operands.
    """

    reader: Reader
    matrix_rate: float
    matrix_type: str

    def __post_init__(self) -> None:
        self._segments: dict[int, float] = {}

    def experts_us(self, distinct: float, flops: float) -> float:
        """Floor of routed experts: `distinct` experts read (the mean of the timed calls)."""
        count = max(1, round(distinct))
        if count not in self._segments:
            self._segments[count] = self.reader.segments_us(count)
        return max(self._segments[count] * distinct / count, flops / self.matrix_rate)

    def dense_us(self, nbytes: float, flops: float) -> float:
        """Floor of anything that reads `nbytes` in order."""
        return max(nbytes / self.reader.bytes_per_us, flops / self.matrix_rate)

    def describe(self) -> str:
        """One line with both rates."""
        read = self.reader.bytes_per_us / 1e6
        return (
            f"read {read:.3g} TB/s, {self.matrix_type} matrix {self.matrix_rate / 1e6:.4g} TFLOP/s"
        )


def measure_ceilings(
    device: torch.device, experts: tuple[int, float], numerics: str, timer: Timer
) -> Ceilings:
    """Ceilings for `experts` (how many, bytes of one) in a class of arithmetic."""
    if device.type == "cpu":
        rate = flops_per_us(device, torch.float32, timer)
        return Ceilings(ClockReader(experts[1], timer), rate, "float32")
    dtype = torch.float8_e4m3fn if numerics == "a8" else torch.bfloat16
    reader = CardReader(device, *experts, timer)
    return Ceilings(reader, flops_per_us(device, dtype, timer), str(dtype).removeprefix("torch."))
