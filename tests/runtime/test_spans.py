"""Spans: which steps a call has, in which order and on which card; off, nothing is held."""

import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from card_layers import on_cards
from exactmoe import Limits
from exactmoe.bank import Partition
from exactmoe.errors import ConfigError
from exactmoe.runtime import spans as spans_of_runtime
from exactmoe.runtime.spans import NO_SPAN, LayerSpans, Recorder, span
from layers import assert_same_bits, layer_of, random_bank, random_call
from small_layers import small_dense, small_layer

CPU = torch.device("cpu")


def recorded(layer, call, index=3, **settings):
    recorder = Recorder({CPU}, **settings)
    layer.spans = LayerSpans(recorder, index, not hasattr(layer, "config"))
    try:
        y = call()
    finally:
        layer.spans = None
    return y, recorder


def steps(recorder):
    return [s.name for s in recorder.spans() if s.name != "call"]


def tokens(layer, rng, count):
    width = layer.config.hidden_size if hasattr(layer, "config") else layer.hidden_size
    return torch.randn((count, width), generator=rng).bfloat16()


@pytest.mark.parametrize(
    ("numerics", "expected"),
    [
        ("a16", ["shared", "router", "sort", "gate_up", "down", "combine"]),
        (
            "a8",
            ["shared", "router", "sort", "quantize", "gate_up", "quantize", "down", "combine"],
        ),
    ],
)
def test_the_steps_of_a_block_and_its_bits(rng, numerics, expected):
    layer = small_layer(rng, numerics=numerics)
    x = tokens(layer, rng, 5)
    y, recorder = recorded(layer, lambda: layer(x))
    assert_same_bits(y, layer(x))
    assert steps(recorder) == expected
    assert {(s.layer, s.width, s.card, s.call, s.inner) for s in recorder.spans()} == {
        (3, 5, 0, 0, False)
    }
    whole = recorder.spans()[-1]
    assert whole.name == "call"
    for one in recorder.spans()[:-1]:
        assert whole.start <= one.start
        assert one.start + one.seconds <= whole.start + whole.seconds
        assert one.seconds > 0
        assert (one.queued, one.queueing) == (one.start, one.seconds)
    assert len(recorder.spans()) == len(expected) + 1  # reading takes nothing away


def test_a_dense_mlp(rng):
    dense = small_dense(rng)
    _, recorder = recorded(dense, lambda: dense(tokens(dense, rng, 2)))
    assert steps(recorder) == ["dense", "finish"]


def test_pieces_are_counted_and_have_their_width(rng):
    bank = random_bank(rng, "nvfp4", 4, 64, 64)
    layer = layer_of(bank, 2, "cpu", limits=Limits(max_rows=3))
    x, ids, weights = random_call(rng, layer, 7)
    _, recorder = recorded(layer, lambda: layer.experts(x, ids, weights))
    whole = [s for s in recorder.spans() if s.name == "call"]
    assert [(s.call, s.width) for s in whole] == [(0, 3), (1, 3), (2, 1)]


@pytest.mark.parametrize("returns", ["slots", "partials"])
def test_cards(rng, returns):
    bank = random_bank(rng, "nvfp4", 8, 64, 64)
    layer = on_cards(layer_of(bank, 2, "cpu"), Partition.even(8, 2), returns)
    x, ids, weights = random_call(rng, layer, 6)
    y, recorder = recorded(layer, lambda: layer.experts(x, ids, weights))
    assert_same_bits(y, layer.experts(x, ids, weights))
    spans = recorder.spans()
    outer = [(s.name, s.card) for s in spans if not s.inner and s.name != "call"]
    assert outer == [
        ("dispatch", 0),
        ("sort", 1),
        ("gate_up", 1),
        ("sort", 0),
        ("gate_up", 0),
        ("down", 1),
        ("down", 0),
        ("return", 0),
        ("combine", 0),
    ]
    # A card combines its own vectors before it sends them: part of the return.
    assert {s.name for s in spans if s.inner} == ({"combine"} if returns == "partials" else set())


def test_a_failed_step_is_not_recorded(rng):
    layer = small_layer(rng)
    recorder = Recorder({CPU})
    call = LayerSpans(recorder, 0, False).call(1, CPU)
    with pytest.raises(RuntimeError, match="planted"), call as spans:
        with span(spans, "sort"):
            pass
        with span(spans, "down"):
            raise RuntimeError("planted")
    assert [s.name for s in recorder.spans()] == ["sort"]
    assert layer.spans is None


def test_what_is_beyond_the_capacity_is_counted(rng):
    layer = small_layer(rng)
    _, recorder = recorded(layer, lambda: layer(tokens(layer, rng, 1)), capacity=2)
    assert steps(recorder) == ["shared", "router"]
    assert recorder.lost == 5
    with pytest.raises(ConfigError, match="capacity is 0; allowed: spans from 1"):
        Recorder({CPU}, 0)


def test_threads_do_not_mix(rng):
    layers = [small_layer(rng), small_layer(rng)]
    recorder = Recorder({CPU})

    def work(index):
        layer = layers[index]
        for _ in range(20):
            layer(x)

    x = tokens(layers[0], rng, 4)
    for index, layer in enumerate(layers):
        layer.spans = LayerSpans(recorder, index, False)
    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spans = recorder.spans()
    assert {s.inner for s in spans} == {False}
    by_call = {}
    for one in spans:
        by_call.setdefault(one.call, []).append(one)
    assert len(by_call) == 40
    for found in by_call.values():
        assert [s.name for s in found] == [
            "shared", "router", "sort", "gate_up", "down", "combine", "call",
        ]  # fmt: skip
        assert len({s.layer for s in found}) == 1


class FalseCard:
    """Stands for torch.cuda: a clock that counts events, two streams, and whether it captures."""

    def __init__(self, monkeypatch):
        self.clock, self.stream, self.capturing = 0, 0xA, False
        self.ranges = []
        card = self

        class Event:
            def __init__(self, enable_timing=False, external=False):
                assert enable_timing and external == card.capturing
                self.at = None

            def record(self, stream=None):
                card.clock += 1
                self.at = None if card.capturing else card.clock

            def synchronize(self):
                assert not card.capturing

            def elapsed_time(self, other):
                if self.at is None or other.at is None:
                    raise RuntimeError("not recorded")
                return float(other.at - self.at)

        def stream():
            return SimpleNamespace(cuda_stream=self.stream, device_index=0)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        monkeypatch.setattr(torch.cuda, "current_stream", stream)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(torch.cuda.nvtx, "range_push", self.ranges.append)
        monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: self.ranges.append("end"))
        monkeypatch.setattr(spans_of_runtime, "capturing", lambda device: self.capturing)


def test_events_of_a_card_are_milliseconds_from_its_zero(monkeypatch):
    card, device = FalseCard(monkeypatch), torch.device("cuda", 0)
    recorder = Recorder({device})
    with LayerSpans(recorder, 2, False).call(8, device) as call:
        card.stream = 0xB
        with span(call, "shared"):
            pass
        card.stream = 0xA
        with span(call, "router"):
            pass
    shared, router, whole = recorder.spans()
    # Events: zero 1, call 2, shared 3 and 4, router 5 and 6, call 7.
    zero = recorder._zero[0][1]
    assert [(s.start - zero, s.seconds) for s in (shared, router, whole)] == [
        (pytest.approx(0.002), pytest.approx(0.001)),
        (pytest.approx(0.004), pytest.approx(0.001)),
        (pytest.approx(0.001), pytest.approx(0.005)),
    ]
    assert [s.lane for s in (shared, router, whole)] == ["0xb", "0xa", "0xa"]
    assert whole.queueing > 0 and whole.queueing != whole.seconds
    assert card.ranges == [
        "exactmoe call, layer 2", "exactmoe shared, layer 2", "end",
        "exactmoe router, layer 2", "end", "end",
    ]  # fmt: skip


def test_in_a_capture_only_the_whole_is_timed(monkeypatch):
    card, device = FalseCard(monkeypatch), torch.device("cuda", 0)
    recorder = Recorder({device})
    layers = [LayerSpans(recorder, index, False) for index in (1, 2)]

    def one_pass(width):
        for layer in layers:
            with layer.call(width, device) as call:
                assert call is None

    card.capturing = True
    one_pass(1)
    one_pass(8)  # another width: another pass
    one_pass(8)  # the layers begin anew
    assert [(c.graph, c.layer, c.width) for c in recorder.captured()] == [
        (0, 1, 1), (0, 2, 1), (1, 1, 8), (1, 2, 8), (2, 1, 8), (2, 2, 8),
    ]  # fmt: skip
    assert {c.seconds for c in recorder.captured()} == {None}  # no replay yet
    for place, event in enumerate(spans_of_runtime._captured_events[-12:]):
        event.at = place
    assert {c.seconds for c in recorder.captured()} == {0.001}
    assert recorder.spans() == []


def test_off_is_a_shared_object():
    assert span(None, "router") is NO_SPAN
    with span(None, "router") as nothing:
        assert nothing is None
