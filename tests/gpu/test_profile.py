"""Profiles on a card: device events eager, totals captured, no wait of the host, the same bits."""

import statistics

import pytest
import torch

from exactmoe.report.profile import profile
from gpu_layers import Layer, dense, generator
from layers import assert_same_bits

HIDDEN = 256
LAYERS = {
    "a16": Layer(),
    "a8": Layer("mxfp4", "a8"),
}


def rows(device, count):
    return torch.randn((count, HIDDEN), device=device).bfloat16()


@pytest.mark.parametrize("kind", LAYERS)
def test_eager_spans(kind, device):
    layer = LAYERS[kind].build(device)
    x = rows(device, 5)
    y = layer(x)
    with profile({4: layer}) as found:
        for _ in range(3):
            assert_same_bits(layer(x), y)
    (row,) = found.rows()
    quantized = ["quantize"] if layer.numerics.activation == "a8" else []
    names = ["router", "sort", "gate_up", *quantized, "down", "shared", "combine"]
    assert (row.layer, row.width, row.calls, list(row.us)) == (4, 5, 3, names)
    assert all(us > 0 for us in row.us.values())
    assert sum(row.us.values()) - sum(row.beside_us.values()) <= 1.01 * row.call_us
    # On a card the shared expert has a stream of its own.
    assert list(row.beside_us) == (["shared"] if device == "cuda" else [])
    spans = found.spans()
    whole = [s for s in spans if s.name == "call"]
    for one in spans:
        mine = whole[one.call]
        assert one.start >= mine.start - 1e-6
        assert one.start + one.seconds <= mine.start + mine.seconds + 1e-6
        assert (one.lane != "") == (device == "cuda")
    starts = [s.start for s in whole]
    assert starts == sorted(starts) and starts[0] > 0


def test_a_dense_mlp(device):
    mlp = dense(generator(device), "bf16", HIDDEN, 512)
    with profile(mlp) as found:
        mlp(rows(device, 3))
    assert list(found.rows()[0].us) == ["dense", "finish"]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", LAYERS)
def test_the_host_waits_for_nothing_while_it_records(kind):
    layer = LAYERS[kind].build("cuda")
    x = rows("cuda", 4)
    layer(x)
    with profile(layer) as found:
        torch.cuda.set_sync_debug_mode("error")
        try:
            layer(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert found.rows()[0].calls == 1


@pytest.mark.gpu
def test_ranges_of_nvtx(monkeypatch):
    layer = LAYERS["a16"].build("cuda")
    said, depth = [], []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda text: depth.append(said.append(text)))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", depth.pop)
    layer(rows("cuda", 2))
    assert said == []
    with profile({7: layer}):
        layer(rows("cuda", 2))
    assert said[0] == "exactmoe call, layer 7"
    assert "exactmoe gate_up, layer 7" in said
    assert depth == []


@pytest.mark.gpu
@pytest.mark.parametrize("kind", LAYERS)
def test_captured_totals(kind):
    layer = LAYERS[kind].build("cuda")
    x = rows("cuda", 8)
    y = layer(x)
    with profile({4: layer}) as found:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(x)
        assert found.graphs() == []  # it was not replayed
        times = []
        for _ in range(20):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            found.sample_graphs()
            times.append(1e3 * start.elapsed_time(end))
    assert_same_bits(out, y)
    (row,) = found.graphs()
    assert (row.graph, row.width, row.replays, list(row.us)) == (0, 8, 20, [4])
    assert 0.2 * statistics.median(times) < row.us[4] <= 1.05 * statistics.median(times)
    assert found.rows() == []  # nothing was recorded inside the graph


@pytest.mark.gpu
def test_each_captured_pass_is_one_graph():
    layers = {index: LAYERS["a16"].build("cuda") for index in (1, 2)}
    for layer in layers.values():
        for count in (1, 8):
            layer(rows("cuda", count))
    inputs = {count: rows("cuda", count) for count in (1, 8)}
    graphs = []
    with profile(layers) as found:
        for count in (1, 8):
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1]):
                for layer in layers.values():
                    layer(inputs[count])
        for graph in graphs:
            graph.replay()
        found.sample_graphs()
    assert [(r.graph, r.width, list(r.us)) for r in found.graphs()] == [
        (0, 1, [1, 2]),
        (1, 8, [1, 2]),
    ]
    del found
    for graph in graphs:  # its events outlive the profile
        graph.replay()
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_the_command(tmp_path):
    import json
    from pathlib import Path

    from typer.testing import CliRunner

    from exactmoe.cli.app import build

    demo = Path(__file__).resolve().parents[2] / "demo" / "glm5_next"
    arguments = ["profile", str(demo), "--cards", "cuda", "--widths", "1,8", "--calls", "3"]
    arguments += ["--json", "--html", str(tmp_path / "p.html"), "--trace", str(tmp_path / "t.json")]
    result = CliRunner().invoke(build(), arguments)
    assert result.exit_code == 0, result.stderr
    content = json.loads(result.stdout)
    assert [row["width"] for row in content["graphs"]] == [1, 8]
    eager = {(row["width"], row["layer"]): row["call_us"] for row in content["eager"]}
    for graph in content["graphs"]:
        assert set(graph["us"]) == {str(layer) for _, layer in eager}
        assert graph["total_us"] > 0
    tracks = {
        e["args"]["name"]
        for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"]
        if e["name"] == "process_name"
    }
    assert tracks == {"host queues", "card 0"}
