"""The way of bytes from a file into the memory of a card.

To the host's memory: read straight to its place. To a GPU: through pinned buffers, two for each
reader, so that one is filled while the copy engine empties the other.
"""

from collections.abc import Callable, Sequence
from threading import Lock, get_ident
from typing import Any

import torch
from torch import Tensor

from exactmoe.checkpoint.files import bytes_of

# Bytes of one read. A reader of a GPU's weights holds two buffers of this size.
PIECE_BYTES = 8 << 20

# Fills memory, one view after the other.
Read = Callable[..., None]


class Lane:
    """Two buffers of one reader, emptied to a GPU on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._buffers = [
            torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)
        ]
        self._emptied = [torch.cuda.Event() for _ in self._buffers]
        self._next = 0

    def send(self, read: Read, targets: Sequence[Tensor], ready: Any) -> None:
        """Fills targets, uint8 of at most PIECE_BYTES together, with what one `read` gives; returns
        before the copies have ended. ready: event after which the targets may be written.
        """
        buffer, emptied = self._buffers[self._next], self._emptied[self._next]
        self._next = 1 - self._next
        emptied.synchronize()
        filled = buffer[: sum(target.numel() for target in targets)]
        read(bytes_of(filled))
        self._stream.wait_event(ready)
        with torch.cuda.stream(self._stream):
            parts = filled.split([target.numel() for target in targets])
            for target, part in zip(targets, parts, strict=True):
                target.copy_(part, non_blocking=True)
        emptied.record(self._stream)

    def drain(self) -> None:
        """Waits until all that was sent is there."""
        self._stream.synchronize()


class Lanes:
    """The lanes of all readers, each made when a reader first sends to a GPU."""

    def __init__(self) -> None:
        self._lanes: dict[tuple[int, torch.device], Lane] = {}
        self._lock = Lock()

    def send(self, read: Read, targets: Sequence[Tensor], ready: Any) -> None:
        """Fills targets of one device, contiguous uint8, with what one `read` gives."""
        device = targets[0].device
        if device.type != "cuda":
            read(*map(bytes_of, targets))
            return
        key = (get_ident(), device)
        with torch.cuda.device(device):
            with self._lock:
                lane = self._lanes.get(key) or self._lanes.setdefault(key, Lane(device))
            lane.send(read, targets, ready)

    def drain(self) -> None:
        """Waits until all that was sent is there."""
        for lane in list(self._lanes.values()):
            lane.drain()

    def close(self) -> None:
        """Waits, and lets the buffers go."""
        self.drain()
        self._lanes.clear()


def writable_after(device: torch.device) -> Any:
    """An event after which memory that was just allocated on a GPU may be written on any stream;
    None on the host.
    """
    if device.type != "cuda":
        return None
    return torch.cuda.current_stream(device).record_event()
