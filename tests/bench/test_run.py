"""A whole benchmark with a false timer: what is measured, in which order, and what stops it."""

from dataclasses import replace

import pytest
import torch

from exactmoe.bench import ceilings, run
from exactmoe.bench.peers import PEERS, Peer
from exactmoe.bench.record import BLOCK, EXPERTS, OURS, SORT
from exactmoe.bench.run import Bench, Settings
from exactmoe.errors import BitMismatch, ConfigError

CPU = torch.device("cpu")


@pytest.fixture
def settings(shape, monkeypatch):
    monkeypatch.setitem(ceilings._MATRIX_SIZE, "cpu", 16)
    monkeypatch.setattr(ceilings, "GIB", 2**20)
    shape = replace(shape, dense_sizes=(64,))
    return Settings(shape, "nvfp4", "a16", CPU, "auto", widths=(1, 5))


def test_every_number(settings, timer):
    told = []
    bench = Bench(replace(settings, peers=("grouped_mm", "cublas")), timer, told.append)
    records = list(bench.records())
    assert [(r.part, r.what, r.tokens) for r in records] == [
        *((part, OURS, width) for width in (1, 5) for part in (EXPERTS, SORT, BLOCK)),
        *(("dense 64", what, width) for width in (1, 5) for what in (OURS, "cublas")),
        (EXPERTS, "grouped_mm", 1),
        (EXPERTS, "grouped_mm", 5),
    ]
    for record in records:
        assert record.us == timer.us and record.floor_us > 0 and record.nbytes > 0
        assert record.part == BLOCK or 1e-4 < record.error < 1e-2
    assert told[0] == "drawing weights: 256,128,8,2, nvfp4"
    assert told.index("verifying bytes") < told.index("experts, 1 tokens")


def test_floor_and_bytes(settings, timer):
    bench = Bench(settings, timer)
    one, _, block = list(bench.records())[:3]
    assert one.distinct_experts == 2
    assert one.nbytes == 2 * bench.problem.expert_bytes
    rate = bench.ceilings.reader.bytes_per_us
    flops = 2 * 2 * 3 * 256 * 128
    assert one.floor_us == max(one.nbytes / rate, flops / bench.ceilings.matrix_rate)
    # Router bf16 and its f32 bias, shared expert bf16.
    extra = 8 * 256 * 2 + 8 * 4 + 3 * 256 * 128 * 2
    assert block.nbytes == one.nbytes + extra


def test_calls_take_turns_over_fresh_selections(settings, timer):
    bench = Bench(settings, timer)
    drawn = [tuple(s.expert_ids.flatten().tolist()) for s in bench._at(5)]
    assert len(drawn) == len(set(drawn)) == run.ROTATED
    wide = run.WIDE + 1
    assert len(Bench(replace(settings, widths=(wide,)), timer)._at(wide)) == run.ROTATED_WIDE


def test_parts(settings, timer):
    records = list(Bench(replace(settings, parts=("sort",)), timer).records())
    assert {r.part for r in records} == {SORT}
    with pytest.raises(ConfigError, match=r"parts are \['speed'\]; allowed: experts, sort"):
        replace(settings, parts=("speed",))


@pytest.mark.parametrize("widths", [(), (0, 1)])
def test_widths_are_checked(settings, widths):
    with pytest.raises(ConfigError, match="widths are"):
        replace(settings, widths=widths)


def test_nothing_is_timed_after_a_wrong_byte(settings, timer, monkeypatch):
    bench = Bench(settings, timer)
    experts = bench.layer.experts

    def faulty(x, ids, weights, out):
        y = experts(x, ids, weights, out=out)
        if len(x) == 1:
            y.view(torch.int16)[0, 3] ^= 1
        return y

    monkeypatch.setattr(bench.layer, "experts", faulty)
    before, records = timer.captured, []
    with pytest.raises(BitMismatch, match="with sort, width 1: token 0, element 3"):
        records += bench.records()
    assert records == [] and timer.captured == before


def test_presorted_must_equal_the_layer(settings, timer, monkeypatch):
    bench = Bench(replace(settings, parts=("experts",)), timer)
    experts = bench.layer.experts
    monkeypatch.setattr(bench.layer, "experts", lambda x, i, w, out: experts(2 * x, i, w, out=out))
    with pytest.raises(BitMismatch, match="experts with a sort made before"):
        list(bench.records())


def broken(problem, widths):
    raise RuntimeError("no  kernel\nimage")


def late(problem, widths):
    def make(selection):
        if selection.num_tokens > 1:
            raise ValueError("too wide")
        return lambda: torch.zeros_like(selection.x)

    return make


def test_peers_that_fail_are_lines(settings, timer, monkeypatch):
    monkeypatch.setitem(PEERS, "broken", Peer("broken", "", "mxfp4", broken))
    monkeypatch.setitem(PEERS, "late", Peer("late", "zeros", "own", late))
    asked = replace(settings, parts=("experts",), peers=("broken", "late", "grouped_mm"))
    records = [r for r in Bench(asked, timer).records() if r.what != OURS]
    assert [(r.what, r.tokens, r.us is None) for r in records] == [
        ("broken", 0, True),
        ("late", 1, False),
        ("late", 0, True),
        ("grouped_mm", 1, False),
        ("grouped_mm", 5, False),
    ]
    assert records[0].note == "RuntimeError: no kernel image"
    # A wrong result is seen by its error.
    assert records[1].error == 1.0 and records[2].note == "ValueError: too wide"


def test_a_peer_of_another_format_has_its_own_weights(settings, timer, monkeypatch):
    seen = []

    def build(problem, widths):
        seen.append(problem)
        return late(problem, widths)

    for name in ("first", "second"):
        monkeypatch.setitem(PEERS, name, Peer(name, "", "mxfp4", build))
    asked = replace(settings, parts=("experts",), widths=(1,), peers=("first", "second"))
    bench = Bench(asked, timer)
    list(bench.records())
    assert seen[0] is seen[1] and seen[0].format == "mxfp4"
    assert seen[0].gate.codes is bench.problem.gate.codes


def test_tiles(settings, timer, monkeypatch):
    read = []
    measure = Bench._measure

    def measured(self, make, width, exact=""):
        tile = run.env.read("EXACTMOE_TILE")
        read.append((width, tile))
        if tile == 24:
            raise ConfigError("EXACTMOE_TILE is 24; allowed: 8, 16")
        return measure(self, make, width, exact)

    monkeypatch.setattr(Bench, "_measure", measured)
    asked = replace(settings, parts=("experts",), tiles=(8, 24))
    records = list(Bench(asked, timer).records())
    assert read == [(1, None), (1, 8), (1, 24), (5, None), (5, 8), (5, 24)]
    assert [r.what for r in records[:3]] == [OURS, "exactmoe tile 8", "exactmoe tile 24"]
    assert records[2].us is None and records[2].note.endswith("allowed: 8, 16")
    assert run.env.read("EXACTMOE_TILE") is None
