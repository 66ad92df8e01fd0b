"""Profiles: which layers, medians, what runs beside, graphs, the trace, the page."""

import json

import pytest
import torch
from torch import nn

import exactmoe
from exactmoe.errors import ConfigError
from exactmoe.report import profile as module
from exactmoe.report.profile import Profile, profile
from exactmoe.report.profile_trace import events
from exactmoe.runtime.spans import CapturedCall, Recorder, Span
from small_layers import small_dense, small_layer


def one(name, start, seconds, **changed):
    facts = {"call": 0, "layer": 1, "width": 4, "card": 0, "lane": "", "inner": False} | changed
    return Span(name=name, start=start, seconds=seconds, queued=start, queueing=seconds, **facts)


class Given(Recorder):
    """A recorder with spans and captured calls as they are given."""

    def __init__(self, spans=(), captured=()):
        super().__init__(set())
        self.given, self.calls = list(spans), list(captured)

    def spans(self):
        return self.given

    def captured(self):
        return self.calls


def x_of(rng, tokens=3):
    return torch.randn((tokens, 64), generator=rng).bfloat16()


def test_the_public_name():
    assert exactmoe.profile is profile


def test_a_layer_a_module_of_layers_and_a_mapping(rng):
    layer, dense = small_layer(rng), small_dense(rng)
    with profile(layer) as found:
        layer(x_of(rng))
    assert [(r.layer, r.kind, r.width, r.calls) for r in found.rows()] == [(0, "moe", 3, 1)]
    assert layer.spans is None
    model = nn.ModuleList([dense, layer])
    with profile(model) as found:
        for part in model:
            part(x_of(rng, 2))
    # The shared expert of the layer is a part of it.
    assert [(r.layer, r.kind) for r in found.rows()] == [(0, "dense"), (1, "moe")]
    with profile({7: dense}) as found:
        dense(x_of(rng))
    row = found.rows()[0]
    assert (row.layer, list(row.us)) == (7, ["dense", "finish"])
    assert row.call_us > sum(row.us.values())


def test_one_profile_at_a_time_and_none_after_an_error(rng):
    layer = small_layer(rng)
    with (
        profile(layer),
        pytest.raises(ConfigError, match=r"layers \[0\] are profiled already"),
        profile(layer),
    ):
        raise AssertionError("not reached")
    with pytest.raises(RuntimeError, match="planted"), profile(layer):
        raise RuntimeError("planted")
    assert layer.spans is None
    with pytest.raises(ConfigError, match="NoneType holds no MoELayer"), profile(None):
        pass
    with pytest.raises(ConfigError, match="Linear holds no MoELayer"), profile(nn.Linear(1, 1)):
        raise AssertionError("not reached")


def test_medians_and_what_runs_beside(rng):
    spans = []
    for call, down in enumerate((5e-6, 1e-6, 3e-6)):
        spans += [
            one("shared", 0, 9e-6, call=call, lane="b"),
            one("quantize", 0, 1e-6, call=call, lane="a"),
            one("quantize", 4e-6, 2e-6, call=call, lane="a"),
            one("down", 2e-6, down, call=call, lane="a"),
            one("combine", 2e-6, 1e-6, call=call, lane="a", inner=True),
            one("call", 0, 10e-6, call=call, lane="a"),
        ]
    spans.append(one("router", 0, 1, call=3))  # of a call that has not ended
    found = Profile({1: small_layer(rng)}, Given(spans)).rows()
    assert len(found) == 1
    row = found[0]
    assert row.calls == 3
    assert row.us == pytest.approx({"quantize": 3, "down": 3, "shared": 9})
    assert row.beside_us == pytest.approx({"shared": 9})
    assert row.rest_us == pytest.approx(10 - 3 - 3)


def test_graphs_are_medians_of_samples(rng):
    recorder = Given(captured=[CapturedCall(0, 1, 4, None)])
    found = Profile({1: small_layer(rng)}, recorder)
    assert found.graphs() == []
    for us in (30, 10, 20):
        recorder.calls = [CapturedCall(0, 1, 4, us / 1e6), CapturedCall(0, 2, 4, 1e-6)]
        found.sample_graphs()
    (graph,) = found.graphs()
    assert (graph.graph, graph.width, graph.replays) == (0, 4, 3)
    assert graph.us == pytest.approx({1: 20, 2: 1})
    assert graph.to_dict()["total_us"] == pytest.approx(21)
    assert "captured graphs" in str(found)


def test_the_trace_has_a_process_a_card_and_a_thread_a_stream(rng, tmp_path):
    spans = [
        one("call", 1.0, 0.5, lane="a"),
        one("down", 1.25, 0.25, lane="a"),
        one("gate_up", 1.25, 0.125, lane="c", card=1),
        one("shared", 1.0, 0.5, lane="b"),
    ]
    made = events(spans)
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in made if e["name"] == "thread_name"}
    assert names == {(0, 0): "calls", (1, 0): "stream a", (2, 1): "stream c", (1, 2): "stream b"}
    processes = {e["pid"]: e["args"]["name"] for e in made if e["name"] == "process_name"}
    assert processes == {0: "host queues", 1: "card 0", 2: "card 1"}
    down = [e for e in made if e["name"] == "down"]
    assert [(e["pid"], e["tid"], e["ts"], e["dur"]) for e in down] == [
        (1, 0, 1.25e6, 0.25e6),
        (0, 0, 1.25e6, 0.25e6),
    ]
    assert down[0]["args"] == {"layer": 1, "tokens": 4, "call": 0}
    path = tmp_path / "trace.json"
    layer = small_layer(rng)
    with profile(layer) as found:
        layer(x_of(rng))
    found.save_trace(path)
    content = json.loads(path.read_text())["traceEvents"]
    complete = [e for e in content if e["ph"] == "X"]
    assert [e["name"] for e in complete][:2] == ["layer 0", "shared"]
    whole = complete[0]
    for event in complete[1:]:
        assert event["ts"] >= whole["ts"]
        assert event["ts"] + event["dur"] <= whole["ts"] + whole["dur"] + 0.002
    assert {e["pid"] for e in content} == {1}  # a CPU queues nothing
    with pytest.raises(ConfigError, match="cannot be written"):
        found.save_trace(tmp_path / "none" / "trace.json")


def test_json(rng):
    layer = small_layer(rng)
    with profile({2: layer}) as found:
        layer(x_of(rng))
    content = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert content["layers"][0]["backend"] == "cpu"
    assert content["layers"][0]["numerics"]["activation"] == "a16"
    assert set(content["eager"][0]["us"]) == {
        "router", "sort", "gate_up", "down", "shared", "combine",
    }  # fmt: skip
    assert (content["graphs"], content["lost_spans"]) == ([], 0)


def test_spans_beyond_the_capacity_are_told(rng):
    layer = small_layer(rng)
    with profile(layer, capacity=7) as found:
        layer(x_of(rng))
        layer(x_of(rng))
    assert (found.lost, found.rows()[0].calls) == (7, 1)
    assert "7 spans were beyond the capacity" in str(found)


def test_devices_of_peers_are_waited_for(rng):
    layer = small_layer(rng)
    assert module._devices({0: layer}) == {torch.device("cpu")}
