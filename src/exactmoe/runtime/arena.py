"""The arena: the memory of a workspace, which one call at a time lays its arrays out in.

A layer lists its regions; their offsets are a closed form, so `workspace_bytes` is known without
running anything. An arena grows only by `reserve` and never inside a call.
"""

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from exactmoe.errors import ConfigError, Unsupported
from exactmoe.runtime.devices import current
from exactmoe.runtime.lanes import Lanes, lanes_of
from exactmoe.runtime.streams import SideStream

ALIGNMENT = 64
_Result = TypeVar("_Result")
_Made = TypeVar("_Made")


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
    with torch.inference_mode(False), current(device):
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        except (RuntimeError, TypeError) as error:  # TypeError: more than an int64 holds
            raise Unsupported(
                f"the workspace needs {nbytes} bytes on {device}, which could not be allocated; "
                "allowed: a max_rows whose workspace_bytes fit"
            ) from error


class _Calls(threading.local):
    """What this thread runs now."""

    home: tuple[torch.device, int] | None = None


_calls = _Calls()


def serving() -> tuple[torch.device, int] | None:
    """Home of the arena that this thread's call runs in; None outside of one."""
    return _calls.home


class _Guard:
    """Who is inside the arena: the lock keeps other threads out, `busy` this thread itself."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.busy = False


class Arena:
    """Memory of one device, for the calls of one stream. What reads or writes it runs in
    `exclusively`, one call at a time.

    Args:
        device: where it lies.
        captured: for CUDA graphs: a buffer that a graph may hold is kept when it is outgrown.
        home: device and stream of the calls.
    """

    def __init__(
        self,
        device: torch.device,
        captured: bool = False,
        home: tuple[torch.device, int] | None = None,
    ) -> None:
        self.device, self.captured = device, captured
        self.home = (device, 0) if home is None else home
        self._guard = _Guard()
        self._inherited = False
        self._outgrown: list[Tensor] = []
        self._kept: WeakKeyDictionary[object, tuple[Hashable, object]] = WeakKeyDictionary()
        self._side: SideStream | None = None
        self._lanes: dict[tuple[torch.device, ...], Lanes] = {}
        self._buffer = _allocate(0, device)

    @property
    def side(self) -> SideStream:
        """The stream beside this arena's own, for what a call runs at the same time."""
        if self._side is None:
            self._side = SideStream(self.device)
        return self._side

    def lanes(self, devices: tuple[torch.device, ...]) -> Lanes:
        """Of the cards on these devices, the first of which is this one, for the calls in here."""
        found = self._lanes.get(devices)
        if found is None:
            found = self._lanes[devices] = lanes_of(devices)
        return found

    def reset(self) -> None:
        """Lets calls on several cards begin again after one has failed."""
        for found in self._lanes.values():
            found.reset()

    @property
    def nbytes(self) -> int:
        return self._buffer.nbytes

    @property
    def held_bytes(self) -> int:
        """Bytes of all its buffers, those too that only captured graphs use."""
        return self.nbytes + sum(buffer.nbytes for buffer in self._outgrown)

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
            before = _calls.home
            try:
                guard.busy, _calls.home = True, self.home
                if self._inherited:
                    self._buffer = _allocate(self.nbytes, self.device)
                    self._inherited = False
                return work()
            finally:
                guard.busy, _calls.home = False, before

    def reserve(self, nbytes: int, then: Callable[[], None] | None = None) -> None:
        """Make the arena at least this large, then run `then` before any call.

        Raises:
            Unsupported: the memory could not be allocated (nothing has changed then), or a call is
                running on this thread.
        """

        def grow() -> None:
            if nbytes > self.nbytes:
                larger = _allocate(nbytes, self.device)
                if self.captured and self.nbytes:
                    self._outgrown.append(self._buffer)
                elif self.nbytes and self.home[0] != self.device:
                    torch.cuda.synchronize(self.device)  # its users are on several streams
                self._buffer = larger
                self._kept.clear()
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

    def views_for(
        self, owner: object, key: Hashable, regions: Callable[[], Sequence[Region]]
    ) -> dict[str, Tensor]:
        """`views(regions())`, made once for an owner until its key or the buffer changes."""
        return self.kept_for(owner, key, lambda: self.views(regions()))

    def kept_for(self, owner: object, key: Hashable, make: Callable[[], _Made]) -> _Made:
        """make(), once for an owner until its key or the buffer changes. One owner, one kind."""
        key = (key, self.generation)
        kept = self._kept.get(owner)
        if kept is None or kept[0] != key:
            kept = self._kept[owner] = (key, make())
        return kept[1]  # type: ignore[return-value]

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
