"""Spans: when each step of a call ran. A block that has no `LayerSpans` pays one check for None.

On a GPU the ends of a span are two events in the stream that its work is queued on, read when
somebody asks; on a CPU they are readings of the clock. In a CUDA graph only whole calls are timed,
by events that every replay records again: events between kernels would change what overlaps.
"""

import itertools
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from exactmoe.errors import ConfigError
from exactmoe.runtime.devices import capturing

# In the order of a call; the last two are of dense MLPs.
NAMES = (
    "router", "sort", "dispatch", "gate_up", "quantize", "down", "return", "shared", "combine",
    "dense", "finish",
)  # fmt: skip
CAPACITY = 200_000
# A graph records its events for as long as somebody replays it, so these are never destroyed.
_captured_events: list[torch.cuda.Event] = []


@dataclass(frozen=True)
class Span:
    """One step of one piece of a call. Times are seconds since the recording began.

    Attributes:
        call: number of the piece, counted from 0 over all layers.
        layer: index of the layer.
        width: tokens of the piece.
        name: of NAMES, or "call" for the whole piece.
        card: that it ran on; 0 where there is one.
        lane: its stream, "" on a CPU.
        start, seconds: on the device.
        queued, queueing: when the host began to queue it, and how long that took; on a CPU, where
            the host computes, the same as start and seconds.
        inner: within another span, whose time it is part of.
    """

    call: int
    layer: int
    width: int
    name: str
    card: int
    lane: str
    start: float
    seconds: float
    queued: float
    queueing: float
    inner: bool


@dataclass(frozen=True)
class CapturedCall:
    """One piece of a call in a CUDA graph, in the graph's latest replay.

    Attributes:
        graph: number of the captured pass over the layers, counted from 0.
        layer, width: as of a Span.
        seconds: on the device; None: it was not replayed yet.
    """

    graph: int
    layer: int
    width: int
    seconds: float | None


class Recorder:
    """What a profile collects, from any thread.

    Args:
        devices: of all layers, their peers included. GPUs are waited for once, to set the clocks.
        capacity: spans that it holds; later ones are counted in `lost`.

    Raises:
        ConfigError: a capacity below 1.
    """

    def __init__(self, devices: set[torch.device], capacity: int = CAPACITY) -> None:
        if capacity < 1:
            raise ConfigError(f"capacity is {capacity}; allowed: spans from 1")
        self.capacity, self.lost = capacity, 0
        self._numbers = itertools.count()
        self._raw: list[_Raw] = []
        self._captured: list[tuple[int, int, int, Any, Any]] = []
        self._last: tuple[int, int] | None = None  # layer and width that were captured last
        self._graphs = 0
        self._cards = {d for d in devices if d.type == "cuda"}
        self._zero: dict[int, tuple[torch.cuda.Event, float]] = {}
        self._began = time.perf_counter()
        for device in self._cards:
            with torch.cuda.device(device):
                event = torch.cuda.Event(enable_timing=True)
                event.record()
                event.synchronize()
            self._zero[device.index] = (event, self.now())

    def now(self) -> float:
        """Seconds since the recording began."""
        return time.perf_counter() - self._began

    def number(self) -> int:
        """A number for the next piece."""
        return next(self._numbers)

    def add(self, raw: "_Raw") -> None:
        """Keep a span."""
        self._last = None
        if len(self._raw) < self.capacity:
            self._raw.append(raw)
        else:
            self.lost += 1

    def begin_captured(self, layer: int, width: int) -> torch.cuda.Event:
        """The first event of a captured call. A pass over the layers ends where their order does,
        or with an eager call.
        """
        if self._last is None or self._last[0] >= layer or self._last[1] != width:
            self._graphs += 1
        self._last = (layer, width)
        return _replayed_event()

    def end_captured(self, layer: int, width: int, first: torch.cuda.Event) -> None:
        """The last event of a captured call."""
        self._captured.append((self._graphs - 1, layer, width, first, _replayed_event()))

    def spans(self) -> list[Span]:
        """What was recorded so far, in the order it was queued. Waits for the devices."""
        self._wait()
        return [self._read(raw) for raw in list(self._raw)]

    def captured(self) -> list[CapturedCall]:
        """Calls in graphs, with the times of each graph's latest replay. Waits for the devices."""
        self._wait()
        return [
            CapturedCall(graph, layer, width, _elapsed(first, last))
            for graph, layer, width, first, last in list(self._captured)
        ]

    def _wait(self) -> None:
        for device in self._cards:
            torch.cuda.synchronize(device)

    def _read(self, raw: "_Raw") -> Span:
        call, queued, ended = raw.call, raw.queued, raw.ended
        start, seconds = queued, ended - queued
        if raw.first is not None and raw.last is not None:
            zero, at = self._zero[raw.device]
            start = at + zero.elapsed_time(raw.first) / 1e3
            seconds = raw.first.elapsed_time(raw.last) / 1e3
        where = (raw.card, raw.lane)
        times = (start, seconds, queued, ended - queued)
        return Span(call.number, call.layer, call.width, raw.name, *where, *times, raw.inner)


def _replayed_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True, external=True)
    event.record()
    _captured_events.append(event)
    return event


def _elapsed(first: torch.cuda.Event, last: torch.cuda.Event) -> float | None:
    """Seconds; None where no replay has recorded both."""
    try:
        return first.elapsed_time(last) / 1e3
    except (RuntimeError, ValueError):  # torch's way to say that an event was not recorded
        return None


@dataclass(eq=False)
class _Raw:
    """A span before its events are read."""

    call: "CallSpans"
    name: str
    card: int
    inner: bool = False
    device: int = -1
    lane: str = ""
    queued: float = 0.0
    ended: float = 0.0
    first: torch.cuda.Event | None = None
    last: torch.cuda.Event | None = None


class LayerSpans:
    """What a recorded layer holds.

    Args:
        recorder: of all layers.
        layer: its index.
        dense: whether it is a dense MLP by itself.
    """

    def __init__(self, recorder: Recorder, layer: int, dense: bool) -> None:
        self.recorder, self.layer, self.dense = recorder, layer, dense

    def call(self, width: int, device: torch.device) -> "AbstractContextManager[CallSpans | None]":
        """Around one piece of `width` tokens on a device; gives the CallSpans of the piece, or None
        in a capture, where only the whole is timed.
        """
        if capturing(device):
            return _CapturedSpan(self, width)
        return CallSpans(self, width, device.type == "cuda")


class CallSpans:
    """One piece of a call that is recorded."""

    def __init__(self, spans: LayerSpans, width: int, on_gpu: bool) -> None:
        self.recorder, self.layer, self.dense = spans.recorder, spans.layer, spans.dense
        self.width, self.on_gpu = width, on_gpu
        self.number = self.recorder.number()
        self.open = -1  # how many spans are open, without the one of the piece
        self._whole = SpanTimer(self, "call", 0)

    def span(self, name: str, card: int = 0) -> "SpanTimer":
        """A context manager around a step."""
        return SpanTimer(self, name, card)

    def __enter__(self) -> "CallSpans":
        self._whole.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._whole.__exit__(kind, error, trace)


class SpanTimer:
    """Times what runs inside; named ranges of NVTX on a GPU."""

    def __init__(self, call: CallSpans, name: str, card: int) -> None:
        self._call, self._raw = call, _Raw(call, name, card)

    def __enter__(self) -> None:
        call, raw = self._call, self._raw
        raw.inner = call.open > 0
        call.open += 1
        raw.queued = call.recorder.now()
        if call.on_gpu:
            torch.cuda.nvtx.range_push(f"exactmoe {raw.name}, layer {call.layer}")
            stream = torch.cuda.current_stream()
            raw.device, raw.lane = stream.device_index, f"{stream.cuda_stream:#x}"
            raw.first = torch.cuda.Event(enable_timing=True)
            raw.first.record(stream)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        call, raw = self._call, self._raw
        call.open -= 1
        if call.on_gpu:
            raw.last = torch.cuda.Event(enable_timing=True)
            raw.last.record()
            torch.cuda.nvtx.range_pop()
        raw.ended = call.recorder.now()
        if error is None:
            call.recorder.add(raw)


class _CapturedSpan:
    """The whole of a piece in a capture."""

    def __init__(self, spans: LayerSpans, width: int) -> None:
        self._spans, self._width = spans, width

    def __enter__(self) -> None:
        spans = self._spans
        self._first = spans.recorder.begin_captured(spans.layer, self._width)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            spans = self._spans
            spans.recorder.end_captured(spans.layer, self._width, self._first)


class _NoSpan:
    """Stands where nothing is recorded."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        return None


NO_SPAN = _NoSpan()


def span(call: CallSpans | None, name: str) -> SpanTimer | _NoSpan:
    """A context manager around a step of a piece that may not be recorded."""
    return NO_SPAN if call is None else call.span(name)
