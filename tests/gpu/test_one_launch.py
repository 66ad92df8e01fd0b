"""gate_up and down of sm_90 in one launch: the bits of two, whatever else runs on the card.
Counters are zeros whenever no kernel runs.
"""

from contextlib import contextmanager

import pytest
import torch

from exactmoe import Numerics, env
from exactmoe.ops.cuda import counters
from exactmoe.runtime.workspace import release_captures
from gpu_layers import Layer
from layers import assert_same_bits

pytestmark = pytest.mark.gpu
WIDTHS = (1, 2, 7, 16, 40, 130, 300, 900)
# hidden 384: the last item of down has one panel. Experts without rows at small widths.
LAYERS = {
    "a16": Layer(hidden=384, inner=640, experts=32, max_rows=1024),
    "a16 f32 slots": Layer(
        "mxfp4", Numerics(slot="f32"), hidden=512, inner=256, experts=8, max_rows=1024
    ),
    "a8": Layer("mxfp4", "a8", hidden=384, inner=640, experts=32, max_rows=1024),
    "a8 nvfp4": Layer("nvfp4", "a8", hidden=512, inner=256, experts=8, max_rows=1024),
}
TIMES = 50


@pytest.fixture(params=LAYERS)
def layer(request):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("only sm_90 has this kernel")
    made = LAYERS[request.param].build("cuda:0")
    assert made.plan().backend == "cuda"
    return made


def rows(layer, count, seed=3):
    rng = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(count, layer.config.hidden_size, device="cuda", generator=rng).bfloat16()


@contextmanager
def counters_zero():
    """Behind all that was queued inside."""
    yield
    torch.cuda.synchronize()
    for key, found in counters._made.items():
        assert not found.any(), (key, found.nonzero().flatten().tolist())


@pytest.mark.parametrize("tokens", WIDTHS)
def test_one_launch_has_the_bits_of_two(layer, tokens):
    x = rows(layer, tokens)
    with counters_zero():
        one = layer(x)
        for name, value in (
            ("EXACTMOE_EXPERTS", "one"),
            ("EXACTMOE_EXPERTS", "two"),
            ("EXACTMOE_HOST_LOOP", "on"),
            *((("EXACTMOE_UNION", "off"),) if tokens < 50 else ()),
        ):
            with env.forced(name, value):
                assert_same_bits(layer(x), one, name)
        for tile in (8, 16, 40, 64, 128):
            with env.forced("EXACTMOE_TILE", str(tile)):
                assert_same_bits(layer(x), one, f"tile {tile}")
        with env.forced("EXACTMOE_EXPERTS", "one"):
            for _ in range(TIMES):
                again = layer(x)
        assert_same_bits(again, one)


def test_no_expert_has_a_row(layer):
    """A card whose experts no token wants: ids that are not there."""
    x = rows(layer, 5)
    ids = torch.full((5, layer.config.top_k), -1, dtype=torch.int32, device="cuda")
    with counters_zero():
        found = layer.experts(x, ids, torch.ones(ids.shape, device="cuda"))
        assert not found.any()
        before = layer(x)
    assert_same_bits(layer(x), before)


def test_a_capture_on_a_stream_without_an_eager_call(layer):
    """Counters do not exist there yet, and a graph must not zero them."""
    x, other = rows(layer, 9), rows(layer, 9, 4)
    expected, expected_other = layer(x), layer(other)
    torch.cuda.synchronize()
    given = x.clone()
    release_captures(torch.device("cuda:0"))
    # As many as torch's pool has: none of them may be the one that counters are made on.
    for _ in range(40):
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=stream):
            y = layer(given)
        with counters_zero():
            for _ in range(3):
                graph.replay()
                assert_same_bits(y, expected)
                given.copy_(other)
                assert_same_bits(layer(x), expected)  # an eager call between
                graph.replay()
                assert_same_bits(y, expected_other)
                given.copy_(x)
    release_captures(torch.device("cuda:0"))


@pytest.mark.parametrize("way", ["one", "two"])
def test_two_streams_of_one_gpu(layer, way, monkeypatch):
    """Kernels share the card: not all blocks of each are there. A deadlock hangs here. Unforced, so
    many slots take two launches.
    """
    monkeypatch.setenv("EXACTMOE_EXPERTS", way)
    inputs = [rows(layer, 30, 5), rows(layer, 300, 6)]
    expected = [layer(x) for x in inputs]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    with counters_zero():
        found = [[], []]
        for _ in range(TIMES):
            for x, stream, kept in zip(inputs, streams, found, strict=True):
                with torch.cuda.stream(stream):
                    kept.append(layer(x))
    for kept, right in zip(found, expected, strict=True):
        for y in kept:
            assert_same_bits(y, right)


@pytest.mark.parametrize("way", ["one", "two"])
def test_two_graphs_at_the_same_time(layer, way, monkeypatch):
    """Captured on streams of their own."""
    monkeypatch.setenv("EXACTMOE_EXPERTS", way)
    inputs = [rows(layer, 8, 7), rows(layer, 64, 8)]
    expected = [layer(x) for x in inputs]
    torch.cuda.synchronize()
    release_captures(torch.device("cuda:0"))
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    made = []
    for x, stream in zip(inputs, streams, strict=True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            made.append((graph, layer(x)))
    torch.cuda.synchronize()
    with counters_zero():
        for _ in range(TIMES):
            for (graph, _), stream in zip(made, streams, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
    for (_, y), right in zip(made, expected, strict=True):
        assert_same_bits(y, right)
    release_captures(torch.device("cuda:0"))
