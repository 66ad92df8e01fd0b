"""The workspace: one arena a device, shared by all layers, sized before the first call.

A layer lists its regions; their offsets are a closed form, so `workspace_bytes` is known without
running anything. The
arena grows only by `reserve` (which a layer calls when it is made) and never inside a call.
"""

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeVar

import torch
from torch import Tensor

from exactmoe.errors import ConfigError, Unsupported

ALIGNMENT = 64
_Result = TypeVar("_Result")


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


def _allocate(nbytes: int, device: torch.device) -> Tensor:
    # Memory made in inference mode could not be written outside of it.
    with torch.inference_mode(False):
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        except (RuntimeError, TypeError) as error:  # TypeError: more than an int64 holds
            raise Unsupported(
                f"the workspace needs {nbytes} bytes on {device}, which could not be allocated; "
                "allowed: a max_rows whose workspace_bytes fit"
            ) from error


class _Guard:
    """Who is inside the arena: the lock keeps other threads out, `busy` this thread itself."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.busy = False


class Arena:
    """Memory of one device. What reads or writes it runs in `exclusively`, one call at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._guard = _Guard()
        self._inherited = False
        self._buffer = _allocate(0, device)

    @property
    def nbytes(self) -> int:
        return self._buffer.nbytes

    @property
    def memory(self) -> Tensor:
        """All of it: uint8 [nbytes]."""
        return self._buffer

    @property
    def generation(self) -> int:
        """Changes whenever the buffer does, so that cached views can be renewed."""
        return self._buffer.data_ptr()

    def exclusively(self, work: Callable[[], _Result]) -> _Result:
        """Runs work() while no other thread is in here.

        Raises:
            Unsupported: this thread is in here already (a signal handler during a call).
        """
        guard = self._guard
        # A signal handler may run between any two lines: it finds `busy`, or is done before it is
        # set. A plain lock would let it wait for its own thread.
        with guard.lock:
            if guard.busy:
                raise Unsupported(
                    f"a call is running on this thread in the workspace of {self.device}; allowed: "
                    "a call, reserve or fill after it has ended (not from a signal handler in it)"
                )
            try:
                guard.busy = True
                if self._inherited:
                    self._buffer = _allocate(self.nbytes, self.device)
                    self._inherited = False
                return work()
            finally:
                guard.busy = False

    def reserve(self, nbytes: int, then: Callable[[], None] | None = None) -> None:
        """Make the arena at least this large, then run `then` before any call.

        Raises:
            Unsupported: the memory could not be allocated (nothing has changed then), or a call is
                running on this thread.
        """

        def grow() -> None:
            if nbytes > self.nbytes:
                self._buffer = _allocate(nbytes, self.device)
            if then is not None:
                then()

        self.exclusively(grow)

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
        with torch.inference_mode(False):  # as in `_allocate`: these are kept from call to call
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
        self.exclusively(lambda: self._buffer.fill_(byte))

    def renew(self) -> None:
        """In a forked child: a free lock, and a buffer of the same size at the next use.

        The parent's lock may be held by a thread that the child doesn't have, and the call that the
        fork interrupted goes on in the old buffer.
        """
        self._guard, self._inherited = _Guard(), True


_arenas: dict[torch.device, Arena] = {}
_arenas_lock = threading.Lock()


def arena(device: torch.device) -> Arena:
    """The arena of a device, made empty when first asked for."""
    with _arenas_lock:
        if device not in _arenas:
            _arenas[device] = Arena(device)
        return _arenas[device]


def _renew_all() -> None:
    global _arenas_lock
    _arenas_lock = threading.Lock()
    for held in _arenas.values():
        held.renew()


os.register_at_fork(after_in_child=_renew_all)
