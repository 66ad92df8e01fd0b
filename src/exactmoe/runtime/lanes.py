"""Lanes: the work of each card of a call, in order. Only marks order one lane behind another.

A card of a GPU has a stream, its marks are events. On a CPU all is done when it is put.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from exactmoe.errors import Unsupported
from exactmoe.runtime.devices import capturing

OWNER = 0


class Lane(Protocol):
    """The work of one card, in order."""

    device: torch.device

    def begin(self) -> None:
        """Before the first work of a call."""

    def put(self, work: Callable[[], None]) -> None:
        """Queue what work() launches."""

    def send(self, work: Callable[[], None], target: "Lane") -> None:
        """Queue copies into the memory of another card, whose lane does not wait for them."""

    def mark(self) -> Any:
        """The point that is reached when all is done that was queued so far."""

    def wait(self, mark: Any) -> None:
        """What is queued from now on comes after the mark of another lane."""

    def end(self) -> None:
        """After the last work of a call: what others queue on the device comes after it."""

    def drain(self) -> None:
        """Returns when all queued work has ended; while a graph is captured, when that is so in the
        graph.
        """


class HostLane:
    """Work is done when it is put."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def begin(self) -> None:
        """Nothing is to be done."""

    def put(self, work: Callable[[], None]) -> None:
        work()

    def send(self, work: Callable[[], None], target: Lane) -> None:
        work()

    def mark(self) -> None:
        """Every point is reached."""

    def wait(self, mark: Any) -> None:
        """It is reached."""

    def end(self) -> None:
        """Nothing is to be done."""

    def drain(self) -> None:
        """Nothing is under way."""


class StreamLane:
    """A card's stream.

    Args:
        device: of the card.
        owner: of the card that the tokens live on.
        own_stream: a stream beside those of the caller; else the device's current one.
    """

    def __init__(self, device: torch.device, owner: torch.device, own_stream: bool) -> None:
        self.device, self._owner = device, owner
        # As runtime/streams.py: of a pool that callers do not draw from.
        self._own = torch.cuda.Stream(device, priority=-1) if own_stream else None
        far = own_stream and device != owner
        # torch lets both devices' current streams wait for each other around a copy between them.
        # This one stands in for the owner's, which computes meanwhile.
        self._landing = torch.cuda.Stream(owner, priority=-1) if far else None
        self._far = far
        self._events: list[torch.cuda.Event] = []
        self._used = 0

    @property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device) if self._own is None else self._own

    def begin(self) -> None:
        self._used = 0
        if self._far and not capturing(self._owner):
            # Work of others on this device, such as a write of weights, comes first.
            event = self._event()
            event.record(torch.cuda.current_stream(self.device))
            self._stream.wait_event(event)

    def put(self, work: Callable[[], None]) -> None:
        if self._own is None:
            work()
            return
        with torch.cuda.stream(self._own):
            work()

    def send(self, work: Callable[[], None], target: Lane) -> None:
        assert isinstance(target, StreamLane)
        if target.device == self.device:
            self.put(work)
            return
        there = target._stream if self._landing is None else self._landing
        with torch.cuda.stream(there), torch.cuda.stream(self._stream):
            work()

    def mark(self) -> torch.cuda.Event:
        event = self._event()
        event.record(self._stream)
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        self._stream.wait_event(mark)

    def end(self) -> None:
        if self._far and not capturing(self._owner):
            torch.cuda.current_stream(self.device).wait_event(self.mark())

    def drain(self) -> None:
        if not capturing(self._owner):
            self._stream.synchronize()
        elif self._own is not None:
            with torch.cuda.stream(self._own):
                drawn_in = torch.cuda.is_current_stream_capturing()
            if drawn_in:  # a capture cannot end before every stream is joined
                torch.cuda.current_stream(self._owner).wait_event(self.mark())

    def _event(self) -> torch.cuda.Event:
        """One that no later mark of this call moves."""
        if self._used == len(self._events):
            self._events.append(torch.cuda.Event())
        self._used += 1
        return self._events[self._used - 1]


class Lanes:
    """A lane for each card that works on the calls of one arena; the owner's is the call's stream.

    Attributes:
        failed: what ended a call before its end; until `reset`, no other begins.
    """

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._lanes = tuple(lanes)
        self.failed: str | None = None

    def __getitem__(self, card: int) -> Lane:
        return self._lanes[card]

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around what queues one piece. If it fails, all lanes are drained before the error goes
        on, so that no copy is under way into memory that is given back.

        Raises:
            Unsupported: an earlier one failed.
        """
        if self.failed is not None:
            raise Unsupported(
                f"an earlier call on these cards failed ({self.failed}); allowed: layer.reset(), "
                "then calls"
            )
        try:
            for lane in self._lanes:
                lane.begin()
            yield
            for lane in self._lanes:
                lane.end()
        except BaseException as error:
            self._abandon(error)
            raise

    def drain(self) -> list[str]:
        """Waits for all lanes; what went wrong in it."""
        found = []
        for card, lane in enumerate(self._lanes):
            try:
                lane.drain()
            except RuntimeError as error:
                found.append(f"draining card {card} on {lane.device} failed: {error}")
        return found

    def _abandon(self, error: BaseException) -> None:
        try:
            captured = capturing(self._lanes[OWNER].device)
        except RuntimeError as second:  # a device that is lost answers nothing
            error.add_note(f"asking for a capture failed: {second}")
            captured = False
        # A capture that fails has queued nothing, and its graph is not to be used.
        if not captured:
            self.failed = f"{type(error).__name__}: {error}"
        for line in self.drain():
            error.add_note(line)

    def reset(self) -> None:
        """Waits for all lanes, then lets calls begin again.

        Raises:
            Unsupported: a device cannot be waited for.
        """
        problems = self.drain()
        if problems:
            raise Unsupported(f"{'; '.join(problems)}; allowed: a new process")
        self.failed = None


def lanes_of(devices: Sequence[torch.device]) -> Lanes:
    """Lanes for cards of these devices, the owner first."""
    owner = devices[OWNER]
    if owner.type != "cuda":
        return Lanes([HostLane(device) for device in devices])
    return Lanes([StreamLane(d, owner, card != OWNER) for card, d in enumerate(devices)])
