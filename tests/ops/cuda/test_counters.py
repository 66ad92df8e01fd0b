"""Which counters a launch of the experts kernel gets. torch.cuda is a fake, memory the CPU's."""

import re
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import files

import pytest
import torch

from exactmoe.ops.cuda import counters as module
from exactmoe.ops.cuda.counters import NUM_COUNTERS, counters
from exactmoe.runtime.arena import Arena, serving

HERE = torch.device("cpu", 0)


@dataclass
class Stream:
    """As torch's, of a pool: which one, and whether a graph is captured from it."""

    cuda_stream: int
    captured: bool = False
    priority: int = 0
    waited: int = 0

    def synchronize(self) -> None:
        assert not self.captured, "a stream that is captured cannot be waited for"
        self.waited += 1


@dataclass
class Card:
    """What counters.py asks of torch.cuda.

    Attributes:
        current: the stream that work is queued on.
        made: stream of each allocation, and whether this thread may allocate beside a capture.
    """

    current: Stream = field(default_factory=lambda: Stream(1))
    made: list[tuple[Stream, bool]] = field(default_factory=list)
    drawn: list[Stream] = field(default_factory=list)
    relaxed: bool = False

    def stream_of_pool(self, device: torch.device, priority: int = 0) -> Stream:
        self.drawn.append(Stream(100 + len(self.drawn), priority=priority))
        return self.drawn[-1]

    @contextmanager
    def on(self, stream: Stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextmanager
    def beside(self):
        self.relaxed = True
        yield
        self.relaxed = False


@pytest.fixture
def card(monkeypatch) -> Card:
    found, zeros = Card(), torch.zeros

    def allocate(*sizes, **options):
        assert not torch.is_inference_mode_enabled()
        found.made.append((found.current, found.relaxed))
        return zeros(*sizes, **options)

    monkeypatch.setattr(module, "_made", {})
    monkeypatch.setattr(module, "capturing", lambda device: found.current.captured)
    monkeypatch.setattr(module, "allocating_beside_a_capture", found.beside)
    monkeypatch.setattr(torch, "zeros", allocate)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: found.current)
    monkeypatch.setattr(torch.cuda, "stream", found.on)
    monkeypatch.setattr(torch.cuda, "Stream", found.stream_of_pool)
    return found


def test_as_many_as_the_kernel_counts():
    folder = files("exactmoe.kernels.cuda")
    text = "".join((folder / name).read_text("utf-8") for name in ("experts.cuh", "fill.cuh"))
    found = [
        int(re.findall(rf"u32 {name} = (\d+);", text)[0]) for name in ("NUM_QUEUES", "MAX_EXPERTS")
    ]
    assert sum(found) == NUM_COUNTERS


def test_zeros_made_on_the_stream_itself_and_kept(card):
    with torch.inference_mode():
        first = counters(HERE)
    assert (first.shape, first.dtype) == ((NUM_COUNTERS,), torch.int32)
    assert not first.any() and not first.is_inference()
    assert counters(HERE) is first
    assert card.made == [(card.current, False)]
    assert card.drawn == [] and card.current.waited == 0  # the host waits for nothing


def test_each_stream_and_each_device_has_its_own(card):
    first = counters(HERE)
    with card.on(Stream(2)):
        second = counters(HERE)
        other = counters(torch.device("cpu", 1))
    assert len({t.data_ptr() for t in (first, second, other)}) == 3
    assert counters(HERE) is first


def test_a_capture_has_its_own_made_beside_it(card):
    """A graph that zeroed them would do so in each replay; a stream of the callers' pool, or of the
    streams beside calls, may be part of the capture.
    """
    eager = counters(HERE)
    captured = Stream(1, captured=True)  # the same stream
    with card.on(captured):
        graphs = counters(HERE)
        assert counters(HERE) is graphs and card.current is captured
    assert graphs is not eager and not graphs.any()
    (beside,) = card.drawn
    assert beside.priority not in (0, -1)
    assert card.made[1:] == [(beside, True)]
    assert beside.waited == 1 and not card.relaxed
    assert counters(HERE) is eager


def test_graphs_of_another_stream_have_their_own(card):
    """What is captured on streams of their own may be replayed at the same time."""
    made = []
    for number in (1, 2):
        with card.on(Stream(number, captured=True)):
            made.append(counters(HERE))
    assert made[0] is not made[1]


@pytest.mark.parametrize("captured", [False, True])
def test_calls_of_two_arenas_share_none_on_one_stream_beside_them(card, captured):
    """A card's lane: torch hands out 32 streams in turn, so two arenas may have the same one, and
    their graphs may be replayed at the same time.
    """
    arenas = [Arena(torch.device("cpu"), captured, (HERE, number)) for number in (1, 2)]
    with card.on(Stream(9, captured)):
        first, second = (arena.exclusively(lambda: counters(HERE)) for arena in arenas)
        assert first is not second
        assert arenas[0].exclusively(lambda: counters(HERE)) is first
        assert arenas[1].exclusively(lambda: counters(HERE)) is second


def test_a_call_in_a_call_and_one_that_fails_leave_the_arena_that_is_served():
    outer, inner = (Arena(torch.device("cpu"), False, (HERE, number)) for number in (1, 2))

    def fails() -> None:
        assert serving() == inner.home
        raise ValueError("planted")

    def calls() -> None:
        with pytest.raises(ValueError, match="planted"):
            inner.exclusively(fails)
        assert serving() == outer.home

    outer.exclusively(calls)
    assert serving() is None
