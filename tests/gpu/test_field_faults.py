"""Field faults A9, A19, A20, A21, A25, A26 and A30 on a card, with the right values.

What has a form on the CPU runs there too; the rest of the field faults is in tests/field_faults.
"""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from exactmoe import ExpertBank, MoELayer
from exactmoe.errors import ConfigError, Unsupported
from exactmoe.proof.backends import paths_of
from exactmoe.proof.dimensions.memory import poison_allocator, unwritten_reads_nan
from exactmoe.proof.stages import experts_of
from exactmoe.runtime.workspace import arena
from gpu_layers import Layer, call, token_ids
from layers import assert_same_bits, layer_of, relative_l2, true_experts

WIDTHS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 257, 1000)
CLASSES = {"a16": Layer(), "a8": Layer("mxfp4", "a8", hashed=True)}
A9_SIZES = [(2880, 2880), (1600, 704), (96, 160), (32, 32), (4096, 640)]


def on_cpu(bank: ExpertBank) -> ExpertBank:
    """A copy, for the float64 truth."""
    weights = (bank.gate, bank.up, bank.down)
    copies = [experts_of(w, list(range(w.num_experts))) for w in weights]
    return ExpertBank(*copies).cpu()


def routes(layer: MoELayer, ids: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    given = torch.tensor(ids, dtype=torch.int32, device=layer.device)[:, None]
    return call(layer, len(ids), ids=given)


@pytest.mark.parametrize(("hidden", "inner"), A9_SIZES)
@pytest.mark.parametrize("format", ["nvfp4", pytest.param("mxfp4", marks=pytest.mark.slow)])
def test_a9_sizes_that_are_no_multiple_of_a_tile(device, format, hidden, inner):
    """Each expert alone in a layer of its own gives the same bits: no stride is wrong."""
    if device == "cpu" and hidden > 96:
        pytest.skip("a CPU takes a minute")
    layer = Layer(format, "a16", hidden, inner, 3, 1, shared=None, limit=None).build(device)
    x, ids, weights = routes(layer, [0, 1, 2, 1, 0, 2, 2, 1])
    y = layer.experts(x, ids, weights)
    assert y.shape == (8, hidden)
    true = true_experts(on_cpu(layer.bank), x.cpu(), ids.cpu(), weights.cpu())
    for expert in range(3):
        rows = (ids[:, 0] == expert).nonzero()[:, 0]
        found = y[rows]
        assert relative_l2(found.cpu(), true[rows.cpu()]) < 2.0**-8
        weight = (layer.bank.gate, layer.bank.up, layer.bank.down)
        alone = layer_of(ExpertBank(*(experts_of(w, [expert]) for w in weight)), 1, "auto")
        zero = torch.zeros_like(ids[rows])
        assert_same_bits(alone.experts(x[rows], zero, weights[rows]), found)
    bare = layer.experts(x, torch.full_like(ids, -1), weights)
    assert_same_bits(bare, torch.zeros_like(bare))


def test_a9_sizes_that_have_no_path(device):
    with pytest.raises(Unsupported, match="hidden and intermediate size are \\(96, 160\\)"):
        Layer("mxfp4", "a8", 96, 160).build(device)


@pytest.mark.parametrize("name", CLASSES)
def test_a19_old_memory_never_shows(device, name):
    """288 experts, most of them empty; workspace and allocator full of zeros, NaN, and 3.4e38."""
    layer = CLASSES[name].changed(experts=288, top_k=8).build(device)
    for tokens in (5, *(WIDTHS if device == "cuda" else (1, 9))):
        x, ids, weights = call(layer, tokens)
        ids[-1] = -1
        ids[0, 1:] = -1
        tokens_in = token_ids(layer, tokens)
        results = []
        for byte in (0x00, 0xFF, 0x7F):
            arena(layer.device).fill(byte)
            if tokens == 5:
                poison_allocator(layer.device)
            with unwritten_reads_nan():
                results.append((layer.experts(x, ids, weights), layer(x, tokens_in)))
        assert_same_bits(results[0][0][-1], torch.zeros_like(x[0]))
        assert not torch.stack([y.isnan().any() for y in results[0]]).any()
        for found in results[1:]:
            for one, other in zip(found, results[0], strict=True):
                assert_same_bits(one, other)


@pytest.mark.parametrize("name", CLASSES)
def test_a20_zero_tokens(device, name):
    layer = CLASSES[name].build(device)
    x, ids, weights = call(layer, 4)
    before = layer(x, token_ids(layer, 4))
    none = token_ids(layer, 0)

    def nothing():
        return (
            layer(x[:0], none),
            layer.experts(x[:0], ids[:0], weights[:0]),
            layer.experts(x[:0], ids[:0].long(), weights[:0]),
            layer.shared(x[:0]),
            *layer.route(x[:0], none),
        )

    results = nothing()
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = (*nothing(), layer(x, token_ids(layer, 4)) if none is None else before)
        graph.replay()
        assert_same_bits(captured[-1], before)
        results = (*results[:4], *captured[4:6])
    for y in results[:4]:
        assert (y.shape, y.dtype, y.device) == ((0, 256), torch.bfloat16, layer.device)
    assert [tuple(part.shape) for part in results[4:]] == [(0, 4), (0, 4)]
    layer.check()
    assert_same_bits(layer(x, token_ids(layer, 4)), before)


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_a21_offsets_beyond_32_bits(device, backend):
    """T x K x 2I = 65600 x 8 x 4096 > 2^31 - 1, in one piece, against calls of 4096 tokens."""
    tokens = 65600 if device == "cuda" else 656
    assert 65600 * 8 * 4096 > 2**31 - 1
    if device == "cpu" and backend == "triton":
        pytest.skip("needs a card")
    inner = 2048 if device == "cuda" else 64
    settings = Layer(hidden=256, inner=inner, top_k=8, shared=None, max_rows=tokens)
    layer = settings.build(device, backend)
    x, ids, weights = call(layer, tokens)
    step = tokens // 16 - 4
    whole = layer.experts(x, ids, weights)
    parts = [
        layer.experts(x[at : at + step], ids[at : at + step], weights[at : at + step])
        for at in range(0, tokens, step)
    ]
    assert_same_bits(whole, torch.cat(parts))
    assert_same_bits(layer(x)[-step:], layer(x[-step:].clone()))
    assert torch.isfinite(whole).all() and whole[-1].float().norm() > 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("tokens", [1, 4, 8, 64])
def test_a25_fifty_replays_with_other_routing(name, tokens):
    layer = CLASSES[name].build("cuda")
    x, ids, weights = call(layer, tokens)
    layer.experts(x, ids, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer.experts(x, ids, weights)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    batches = [call(layer, tokens, seed) for seed in range(50)]
    batches[7][1].zero_()
    batches[8][1].fill_(-1)
    eager = [layer.experts(*batch) for batch in batches]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for batch, expected in zip(batches, eager, strict=True):
        for static, given in zip((x, ids, weights), batch, strict=True):
            static.copy_(given)
        graph.replay()
        wrong += (y.view(torch.int16) != expected.view(torch.int16)).sum()
    assert int(wrong) == 0
    assert torch.cuda.memory_allocated() == before
    layer.check()


@pytest.mark.gpu
def test_a25_capture_without_warm_up():
    """A clear error or a right graph, and the layer works afterwards."""
    layer = Layer("mxfp4", inner=384).build("cuda")
    x, ids, weights = call(layer, 6)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            y = layer.experts(x, ids, weights)
    except Unsupported as error:
        assert "captur" in str(error)
        torch.cuda.synchronize()
        y = layer.experts(x, ids, weights)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer.experts(x, ids, weights)
    graph.replay()
    assert_same_bits(y, layer.experts(x, ids, weights))


@pytest.mark.gpu
def test_a25_growing_under_a_graph_is_refused():
    layer = Layer().build("cuda")
    x, ids, weights = call(layer, 4)
    layer.experts(x, ids, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer.experts(x, ids, weights)
    with pytest.raises(Unsupported, match="captured CUDA graphs may be alive"):
        layer.reserve(1 << 20)
    assert layer.limits.max_rows == 512
    graph.replay()
    assert_same_bits(y, layer.experts(x, ids, weights))


@pytest.mark.two_gpu
def test_a26_the_card_of_the_tensors():
    """Current is cuda:0 throughout: one by one, in turn, from two threads, on another stream."""
    torch.cuda.set_device(0)
    cards = [torch.device("cuda", index) for index in range(2)]
    first = Layer().build("cuda:0")
    layers = [first, Layer().build("cuda:0").to("cuda:1")]
    batch = call(first, 33)
    given = [[part.to(card) for part in batch] for card in cards]
    expected = [first.experts(*batch).cpu(), first(batch[0]).cpu()]

    def check(index: int) -> None:
        layer, parts = layers[index], given[index]
        assert layer.device == cards[index]
        y = layer.experts(*parts)
        assert y.device == cards[index]
        assert_same_bits(y.cpu(), expected[0])
        assert_same_bits(layer(parts[0]).cpu(), expected[1])

    for turn in range(20):
        check(turn % 2)
    assert torch.cuda.current_device() == 0
    with ThreadPoolExecutor(2) as pool:
        for _ in range(5):
            list(pool.map(check, (0, 1)))
    stream = torch.cuda.Stream("cuda:1")
    stream.wait_stream(torch.cuda.current_stream("cuda:1"))
    with torch.cuda.stream(stream):
        check(1)


def test_a30_path_tile_and_reason_of_every_width(device):
    layer = Layer().build(device)
    for tokens in WIDTHS:
        said = layer.explain(tokens)
        assert said.plan.backend == paths_of(layer)[0]
        assert said.plan.reason
        rejected = {r.backend for r in said.plan.rejected}
        assert rejected == {"cuda", "triton", "cpu", "reference"} - {said.plan.backend}
        if device == "cuda":
            assert "tokens x" in str(said)


def test_a30_what_was_asked_for_runs_or_is_refused(device):
    """backend="cuda" on sizes without fragment order, or without a card, is no silent fallback."""
    settings = Layer(hidden=96, inner=160, shared=None)
    with pytest.raises(Unsupported, match="backend 'cuda' cannot run on"):
        settings.build(device, "cuda")
    with pytest.raises(ConfigError, match="backend is 'marlin'; allowed: auto, cuda, triton"):
        settings.build(device, "marlin")


@pytest.mark.gpu
def test_a30_an_unknown_card_is_refused_with_the_list(monkeypatch):
    from exactmoe.plan import architectures, choose

    layer = Layer(shared=None)
    monkeypatch.setattr(architectures, "architecture_name", lambda device: "sm_75")
    choose_module = sys.modules[choose.__module__]
    choose_module._chosen.cache_clear()
    try:
        with pytest.raises(Unsupported, match="sm_75, which has no path; allowed: sm_80, sm_86"):
            layer.build("cuda")
    finally:
        choose_module._chosen.cache_clear()
