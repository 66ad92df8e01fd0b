"""The workspace: one arena a device, shared by all layers, sized before the first call.

A layer lists its regions; their offsets are a closed form, so `workspace_bytes` is known without
running anything. The
arena grows only by `reserve` (which a layer calls when it is made) and never inside a call.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from exactmoe.errors import ConfigError

ALIGNMENT = 64


@dataclass(frozen=True)
class Region:
    """One named array of the workspace."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes, rounded up so that the next region is aligned."""
        size = prod(self.shape) * self.dtype.itemsize
        return -(-size // ALIGNMENT) * ALIGNMENT


def total_bytes(regions: Sequence[Region]) -> int:
    """Bytes that the regions take side by side."""
    return sum(region.nbytes for region in regions)


class Arena:
    """Memory of one device. `lock` is held for the length of one call, so calls from two threads
    don't mix.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lock = threading.RLock()
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)

    @property
    def nbytes(self) -> int:
        return self._buffer.nbytes

    @property
    def generation(self) -> int:
        """Changes whenever the buffer does, so that cached views can be renewed."""
        return self._buffer.data_ptr()

    def reserve(self, nbytes: int) -> None:
        """Make the arena at least this large. Must not be called while a call runs: it takes the
        lock.
        """
        # Memory made in inference mode could not be written outside of it.
        with self.lock, torch.inference_mode(False):
            if nbytes > self.nbytes:
                self._buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def views(self, regions: Sequence[Region]) -> dict[str, Tensor]:
        """The regions as tensors, side by side from the start of the arena.

        Raises:
            ConfigError: they need more than was reserved.
        """
        if total_bytes(regions) > self.nbytes:
            raise ConfigError(
                f"the workspace of {self.device} holds {self.nbytes} bytes and "
                f"{total_bytes(regions)} are needed; reserve them first"
            )
        views, offset = {}, 0
        with torch.inference_mode(False):  # as in `reserve`: these are kept from call to call
            for region in regions:
                size = prod(region.shape) * region.dtype.itemsize
                part = self._buffer[offset : offset + size]
                views[region.name] = part.view(region.dtype).view(region.shape)
                offset += region.nbytes
        return views

    def fill(self, byte: int) -> None:
        """Overwrite all of it (0xFF makes every float a NaN): a proof uses this, since old content
        must not matter.
        """
        with self.lock:
            self._buffer.fill_(byte)


_arenas: dict[torch.device, Arena] = {}
_arenas_lock = threading.Lock()


def arena(device: torch.device) -> Arena:
    """The arena of a device, made empty when first asked for."""
    with _arenas_lock:
        if device not in _arenas:
            _arenas[device] = Arena(device)
        return _arenas[device]
