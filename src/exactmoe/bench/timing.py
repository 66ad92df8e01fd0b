"""Times: medians of CUDA-graph replays on a card, of clock readings on a CPU.

What is timed is a list of calls over different inputs, in turn, so that no cache holds the next
call's weights.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Call = Callable[[], Tensor]
WARM_REPLAYS = 3
REPLAYS = (5, 400)


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: the median, and the 10th and 90th of 100."""

    us: float
    low_us: float
    high_us: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Timing":
        """Of samples in microseconds, at least one."""
        ordered = sorted(samples)
        tenth = len(ordered) // 10
        return cls(statistics.median(ordered), ordered[tenth], ordered[-1 - tenth])


class Replay(Protocol):
    """A list of calls, ready to run again and again."""

    outputs: list[Tensor]

    def run(self) -> None:
        """All calls once; their results are in `outputs` when it returns."""

    def time(self) -> Timing:
        """Microseconds of one call."""


class Timer(Protocol):
    """Makes a Replay. A test may give a false one."""

    def capture(self, calls: Sequence[Call]) -> Replay:
        """The calls, run before at least once, as a Replay."""


def _replays(seconds: float, one: float) -> int:
    low, high = REPLAYS
    return max(low, min(high, int(seconds / max(one, 1e-7))))


class GraphTimer:
    """All calls in one CUDA graph, timed by events around its replays.

    Args:
        seconds: of replays for one measurement; at least 5 replays run.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def capture(self, calls: Sequence[Call]) -> "GraphReplay":
        # No warm-up on a stream of its own: the calls have run, and each stream has an arena.
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = [call() for call in calls]
        return GraphReplay(graph, outputs, self.seconds)


class GraphReplay:
    """A captured graph and the tensors that it writes."""

    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: list[Tensor], seconds: float) -> None:
        self._graph, self.outputs, self._seconds = graph, outputs, seconds

    def run(self) -> None:
        self._graph.replay()
        torch.cuda.synchronize()

    def time(self) -> Timing:
        for _ in range(WARM_REPLAYS):
            self._graph.replay()
        one = statistics.median(self._milliseconds(WARM_REPLAYS)) / 1e3
        # All are queued at once: the card never waits for the host between an event and a graph.
        samples = self._milliseconds(_replays(self._seconds, one))
        return Timing.of([sample * 1e3 / len(self.outputs) for sample in samples])

    def _milliseconds(self, count: int) -> list[float]:
        pairs = []
        for _ in range(count):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            self._graph.replay()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in pairs]


class ClockTimer:
    """The calls in turn, each timed by the clock.

    Args:
        seconds: of calls for one measurement; each call runs at least once.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def capture(self, calls: Sequence[Call]) -> "ClockReplay":
        return ClockReplay(calls, self.seconds)


class ClockReplay:
    """Calls and what they gave."""

    def __init__(self, calls: Sequence[Call], seconds: float) -> None:
        self._calls, self._seconds = calls, seconds
        self.outputs = [call() for call in calls]

    def run(self) -> None:
        self.outputs = [call() for call in self._calls]

    def time(self) -> Timing:
        samples: list[float] = []
        end = time.perf_counter() + self._seconds
        while len(samples) < len(self._calls) or time.perf_counter() < end:
            start = time.perf_counter()
            self._calls[len(samples) % len(self._calls)]()
            samples.append((time.perf_counter() - start) * 1e6)
        return Timing.of(samples)


def timer_of(device: torch.device, seconds: float) -> Timer:
    """The timer of a device."""
    return GraphTimer(seconds) if device.type == "cuda" else ClockTimer(seconds)
