"""The workspace of a process: one arena a (device, stream), shared by all layers.

What a layer reserves holds for its device: the arena of the current stream grows at once, that of
another stream when a call on it comes next.

A CUDA graph keeps the addresses that it was captured with. So a capture takes an arena of its own,
one for each stream that captures: eager calls never touch it, and the graphs of one such stream
share it, so their replays must be ordered; what is to be replayed at the same time is captured on
streams of their own (`torch.cuda.graph(graph, stream=...)`). Its memory comes from the pool of the
graph that is captured first, where torch puts whatever is allocated meanwhile; a pool lasts while
memory in it is in use, and this memory is held here until `release_captures`, whatever becomes of
the graph. A buffer that a later capture outgrows is held as well.

A layer over several devices has, for each arena of its first one, an arena on each of the others.
"""

import logging
import os
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from exactmoe.errors import Unsupported
from exactmoe.runtime.arena import ALIGNMENT, Arena, Region, total_bytes
from exactmoe.runtime.devices import allocating_beside_a_capture, capturing

_log = logging.getLogger("exactmoe")


class _Device:
    """The arenas of one device."""

    def __init__(self) -> None:
        self.reserved = 0
        self.reserved_beside = 0  # in arenas whose calls come from another device
        # By the device and the stream whose calls they serve, and whether for captures.
        self.arenas: dict[tuple[tuple[torch.device, int], bool], Arena] = {}
        self.needs: WeakKeyDictionary[object, int] = WeakKeyDictionary()
        self.releases = 0


_devices: dict[torch.device, _Device] = {}
# Re-entrant: a signal handler may come while it is held.
_lock = threading.RLock()


def _of(device: torch.device) -> _Device:
    with _lock:
        return _devices.setdefault(device, _Device())


def arena(device: torch.device) -> Arena:
    """The arena for a call that is queued now: of the device's current stream, or of the graph that
    this stream captures. As large as all layers of the device have reserved.
    """
    state = _of(device)
    captured = capturing(device)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    found = _found(state, device, (device, stream), captured)
    if found.nbytes < state.reserved:
        _grow(found, state, state.reserved)
    return found


def _found(
    state: _Device, device: torch.device, home: tuple[torch.device, int], captured: bool
) -> Arena:
    with _lock:
        found = state.arenas.get((home, captured))
        if found is None:
            found = state.arenas[home, captured] = Arena(device, captured, home)
    return found


def beside(held: Arena, device: torch.device) -> Arena:
    """The arena on another device for the calls of `held`, as large as all layers have reserved for
    such calls. Those who let it grow have no work under way in it.
    """
    state = _of(device)
    alone = allocating_beside_a_capture if held.captured and device.type == "cuda" else nullcontext
    found = state.arenas.get((held.home, held.captured))
    if found is None or found.nbytes < state.reserved_beside:
        with alone():
            found = _found(state, device, held.home, held.captured)
            _grow(found, state, state.reserved_beside)
    return found


def _grow(held: Arena, state: _Device, nbytes: int, then: Callable[[], None] | None = None) -> None:
    before = held.nbytes
    held.reserve(nbytes, then)
    if held.nbytes > before:
        use = "captured CUDA graphs" if held.captured else "calls"
        _log.info("workspace for %s on %s: %s", use, held.device, Sharing.of(held.device))


def reserve(
    device: torch.device, owner: object, nbytes: int, then: Callable[[], None] | None = None
) -> None:
    """A layer's need: arenas of the device are at least this large from now on; `then` runs before
    any call on this stream.

    Raises:
        Unsupported: the memory could not be allocated (nothing has changed then), or a call is
            running on this thread.
    """
    state = _of(device)
    _grow_for(owner, arena(device), state, nbytes, then)
    state.reserved = max(state.reserved, nbytes)


def reserve_beside(home: torch.device, device: torch.device, owner: object, nbytes: int) -> None:
    """The same for what a layer of `home` needs on another device."""
    state = _of(device)
    _grow_for(owner, beside(arena(home), device), state, nbytes)
    state.reserved_beside = max(state.reserved_beside, nbytes)


def _grow_for(
    owner: object,
    held: Arena,
    state: _Device,
    nbytes: int,
    then: Callable[[], None] | None = None,
) -> None:
    with _lock:
        before = state.needs.get(owner)
        state.needs[owner] = nbytes
    try:
        _grow(held, state, nbytes, then)
    except BaseException:
        with _lock:
            if before is None:
                del state.needs[owner]
            else:
                state.needs[owner] = before
        raise


def require_no_captures(device: torch.device, nbytes: int, home: torch.device) -> None:
    """Unsupported if arenas for calls of `home` had to grow to `nbytes` while a captured graph may
    be alive.
    """
    state = _of(device)
    reserved = state.reserved if device == home else state.reserved_beside
    if nbytes > reserved and captures_alive(device):
        raise Unsupported(
            f"the workspace of {device} would grow from {reserved} to {nbytes} bytes while "
            "captured CUDA graphs may be alive; allowed: reserve before the first capture, or "
            "after exactmoe.runtime.workspace.release_captures(device) when they are gone"
        )


def captures_alive(device: torch.device) -> bool:
    """Whether a graph that uses this device was captured since the last `release_captures`."""
    with _lock:
        return any(captured for _, captured in _of(device).arenas)


def release_captures(device: torch.device) -> None:
    """Gives back the memory of captures, that on other cards of their layers too. The caller says
    by it that no graph which was captured on this device will be replayed again.
    """
    with _lock:
        _of(device).releases += 1
        for other, state in _devices.items():
            kept = {
                key: held
                for key, held in state.arenas.items()
                if not (held.captured and held.home[0] == device)
            }
            if len(kept) < len(state.arenas) and other != device:
                state.releases += 1
            state.arenas = kept


def reset(device: torch.device) -> None:
    """Lets calls of this device's layers on several cards begin again after one has failed."""
    with _lock:
        held = list(_of(device).arenas.values())
    for each in held:
        each.exclusively(each.reset)


def releases(device: torch.device) -> int:
    """How often captures were released: graphs of an earlier count are gone."""
    return _of(device).releases


@dataclass(frozen=True)
class Sharing:
    """What the workspace of a device takes, and what it saves.

    Attributes:
        nbytes: of all its arenas.
        arenas: how many there are, one a stream.
        layers: that share them.
        private_bytes: what they would take with one private copy each.
    """

    nbytes: int
    arenas: int
    layers: int
    private_bytes: int

    @classmethod
    def of(cls, device: torch.device) -> "Sharing":
        state = _of(device)
        with _lock:
            held, needs = list(state.arenas.values()), list(state.needs.values())
        return cls(sum(a.held_bytes for a in held), len(held), len(needs), sum(needs))

    def __str__(self) -> str:
        return (
            f"{self.nbytes / 1e6:.1f} MB in {self.arenas} arena{'s' * (self.arenas != 1)}, shared "
            f"by {self.layers} layer{'s' * (self.layers != 1)}; private copies would take "
            f"{self.private_bytes / 1e6:.1f} MB"
        )


def _renew_all() -> None:
    global _lock
    _lock = threading.RLock()
    for state in _devices.values():
        for held in state.arenas.values():
            held.renew()


os.register_at_fork(after_in_child=_renew_all)

__all__ = [
    "ALIGNMENT",
    "Arena",
    "Region",
    "Sharing",
    "arena",
    "beside",
    "captures_alive",
    "release_captures",
    "releases",
    "require_no_captures",
    "reserve",
    "reserve_beside",
    "reset",
    "total_bytes",
]
