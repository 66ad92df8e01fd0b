"""Links: whether bytes that go from one GPU to another arrive as they were, and how fast.

That a card can be addressed from another does not say that its bytes arrive. Each pair is tried
once a process, in sizes of real payloads, into memory that holds other bytes.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from exactmoe.errors import Unsupported
from exactmoe.runtime import notes
from exactmoe.runtime.devices import capturing, current

SIZES = (16 << 10, 64 << 10, 512 << 10, 1 << 20, 64 << 20)
# Of copies whose times are taken; the best counts.
_TURNS = 3
Copy = Callable[[Tensor, Tensor], None]


@dataclass(frozen=True)
class Rate:
    """nbytes in one copy, and how many of them arrived a second, at best."""

    nbytes: int
    bytes_per_second: float


@dataclass(frozen=True)
class Link:
    """The way from one device to another.

    Attributes:
        direct: each reads and writes the other's memory where it is.
        rates: by size, ascending.
    """

    source: torch.device
    target: torch.device
    direct: bool
    rates: tuple[Rate, ...]

    def __str__(self) -> str:
        rates = ", ".join(f"{_size(r.nbytes)} {r.bytes_per_second / 1e9:.3g}" for r in self.rates)
        way = "direct" if self.direct else "through the host"
        return f"{self.source} to {self.target}: {way}, GB/s at {rates}"


@cache
def link(source: torch.device, target: torch.device) -> Link:
    """The way between two GPUs, tried once a process.

    Raises:
        Unsupported: a byte did not arrive as it was sent; or a graph is being captured.
    """
    for device in (source, target):
        if capturing(device):
            raise Unsupported(
                f"the way from {source} to {target} is tried for the first time while a CUDA graph "
                "is captured; allowed: to make the layer, and to call it once, before"
            )
        torch.cuda.Stream(device, priority=-1)  # makes torch's streams, which no capture may do
    direct = torch.cuda.can_device_access_peer(source, target)
    direct = direct and torch.cuda.can_device_access_peer(target, source)
    rates = try_copies(source, target, copied, f"copies from {source} to {target}")
    if direct:
        try_copies(source, target, carried, f"kernels of {target} that read {source}")
        _compile_carry(target)
    found = Link(source, target, direct, rates)
    notes.once(logging.INFO, (source, target), lambda: str(found))
    return found


def copied(source: Tensor, target: Tensor) -> None:
    """By torch, on the source's current stream."""
    target.copy_(source)


def carried(source: Tensor, target: Tensor) -> None:
    """By a kernel of the target, which reads the source where it lies."""
    from exactmoe.ops.triton.cards import carry

    _wait(source.device)
    with current(target.device):
        carry([(source, target)])


def try_copies(
    source: torch.device,
    target: torch.device,
    copy: Copy,
    what: str,
    sizes: Sequence[int] = SIZES,
) -> tuple[Rate, ...]:
    """Copies of each size into memory that holds the inverted bytes, compared byte by byte.

    Raises:
        Unsupported: names size, byte, and what was found there.
    """
    rates = []
    for nbytes in sizes:
        sent = _pattern(nbytes).to(source)
        landed = (~sent).to(target)
        # What was just uploaded must have arrived before another stream reads it.
        _wait(source)
        _wait(target)
        copy(sent, landed)
        _wait(source)
        _wait(target)
        wanted, found = sent.cpu(), landed.cpu()
        if not torch.equal(wanted, found):
            place = int((wanted != found).nonzero()[0])
            raise Unsupported(
                f"{what}: of {nbytes} bytes, byte {place} is 0x{int(found[place]):02X} and was "
                f"0x{int(wanted[place]):02X}; allowed: cards whose bytes arrive as they were sent"
            )
        rates.append(Rate(nbytes, nbytes / _seconds(sent, landed, copy)))
    return tuple(rates)


def _pattern(nbytes: int) -> Tensor:
    """Bytes that differ by place and do not repeat in any power of two: uint8 [nbytes]."""
    words = torch.arange(nbytes // 4, dtype=torch.int64) * 2654435761 + 12345
    return (words ^ (words >> 15)).to(torch.int32).view(torch.uint8)


def _seconds(source: Tensor, target: Tensor, copy: Copy) -> float:
    best = float("inf")
    for _ in range(_TURNS):
        start = time.perf_counter()
        copy(source, target)
        _wait(source.device)
        _wait(target.device)
        best = min(best, time.perf_counter() - start)
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _compile_carry(device: torch.device) -> None:
    """All forms of the kernel: a call that is captured may be the first to need it."""
    from exactmoe.ops.triton.cards import carry

    with current(device):
        words = torch.zeros(2, 64, dtype=torch.int32, device=device)
        part = (words[0], words[1])
        for count in range(1, 5):
            carry([part] * count)
        carry([part], (words[0], 1, words[1], 1))
        torch.cuda.synchronize(device)


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"
