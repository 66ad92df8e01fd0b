"""Calls on a card: what they allocate, which arena they take, streams, threads and captures."""

import copy
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

from exactmoe import DenseMLP, ExpertBank, Limits, MoELayer, Router, RouterConfig
from exactmoe.errors import Unsupported
from exactmoe.runtime import workspace
from exactmoe.runtime.workspace import Sharing, arena, release_captures
from layers import assert_same_bits, layer_of, normal, random_bank, random_call

pytestmark = pytest.mark.gpu
ROWS = 64
BACKENDS = ("cuda", "triton")


@pytest.fixture
def card() -> torch.device:
    device = torch.device("cuda", torch.cuda.current_device())
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("backend 'cuda' needs compute capability 9.0")
    release_captures(device)
    return device


def make(rng, card, backend="cuda", rows=ROWS, hidden=256) -> MoELayer:
    router = Router(normal(rng, 8, hidden), config=RouterConfig("sigmoid")).to(card)
    sizes = ((128, hidden), (128, hidden), (hidden, 128))
    shared = DenseMLP(*(normal(rng, *s, scale=0.1).to(card) for s in sizes), backend=backend)
    bank: ExpertBank = random_bank(rng, "nvfp4", 8, hidden, 128).to(card)
    limits = Limits(max_rows=rows)
    return layer_of(bank, 4, backend, router=router, shared=shared, limits=limits)


def more_rows(layer: MoELayer) -> int:
    """Tokens a piece for which such a layer needs more than any layer before it has reserved."""
    rows, reserved = ROWS, workspace._of(layer.device).reserved
    while layer.workspace_bytes(rows) <= reserved:
        rows += rows // 4
    return rows


def call_of(rng, layer, tokens):
    return tuple(t.to(layer.device) for t in random_call(rng, layer, tokens))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [1, 7, ROWS, 3 * ROWS + 1])
def test_y_is_the_only_allocation(backend, tokens, card, rng):
    layer = make(rng, card, backend)
    call = call_of(rng, layer, tokens)
    strided = (call[0].T.contiguous().T, call[1].long(), call[2].T.contiguous().T)
    for run in (
        lambda: layer(call[0]),
        lambda: layer.experts(*call),
        lambda: layer.experts(*strided),
    ):
        run()
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats(card)["allocation.all.allocated"]
        y = run()
        count = torch.cuda.memory_stats(card)["allocation.all.allocated"] - before
        assert count == 1 and y.shape == (tokens, 256)
        out = torch.empty_like(y)
        before = torch.cuda.memory_stats(card)["allocation.all.allocated"]
        layer.experts(*call, out=out)
        assert torch.cuda.memory_stats(card)["allocation.all.allocated"] == before


def test_a_layer_holds_its_weights_and_its_workspace(card, rng):
    rows = more_rows(make(rng, card))
    held = arena(card).nbytes
    before = Sharing.of(card).nbytes
    layer = make(rng, card, rows=rows)
    assert layer.workspace_bytes() > held
    assert Sharing.of(card).nbytes - before == layer.workspace_bytes() - held
    assert arena(card).nbytes == layer.workspace_bytes()


def test_tokens_a_piece_by_default(card, rng):
    layer = layer_of(random_bank(rng, "nvfp4", 2, 128, 128).to(card), 1, "auto")
    assert layer.limits == Limits(max_rows=4096)
    assert layer.explain(8193).pieces == 3
    assert layer.workspace_bytes() == layer.workspace_bytes(4096)
    assert copy.deepcopy(layer).to("cpu").limits == Limits(max_rows=512)


@pytest.mark.parametrize("backend", BACKENDS)
def test_strides_types_and_poison_change_nothing(backend, card, rng):
    layer = make(rng, card, backend)
    x, ids, weights = call_of(rng, layer, 9)
    expected, block = layer.experts(x, ids, weights), layer(x)
    for byte in (0xFF, 0x7F, 0):
        arena(card).fill(byte)
        assert_same_bits(layer.experts(x, ids.long(), weights), expected)
        arena(card).fill(byte)
        assert_same_bits(layer.experts(x.T.contiguous().T, ids.T.contiguous().T, weights), expected)
        shifted = torch.zeros(x.numel() + 1, dtype=x.dtype, device=card)[1:].view_as(x).copy_(x)
        assert_same_bits(layer.experts(shifted, ids, weights), expected)
        assert_same_bits(layer(shifted), block)


def test_the_side_stream_changes_no_bit(card, rng, monkeypatch):
    layer = make(rng, card)
    for tokens in (1, 33, 200):
        x = normal(rng, tokens, 256).to(card)
        results = []
        for setting in ("on", "off"):
            monkeypatch.setenv("EXACTMOE_SHARED_STREAM", setting)
            results += [layer(x) for _ in range(5)]
        for y in results:
            assert_same_bits(y, results[0])


def test_each_stream_has_an_arena(card, rng):
    layer = make(rng, card)
    call = call_of(rng, layer, 40)
    expected, default = layer.experts(*call), arena(card)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream(card)
    with torch.cuda.stream(stream):
        own = arena(card)
        assert own is not default and own.nbytes >= layer.workspace_bytes()
        found = [layer.experts(*call) for _ in range(10)]
    default.fill(0xFF)
    stream.synchronize()
    for y in found:
        assert_same_bits(y, expected)


@pytest.mark.parametrize("own_stream", [False, True])
def test_two_threads(own_stream, card, rng):
    layer = make(rng, card)
    calls = [call_of(rng, layer, tokens) for tokens in (5, 150)]
    expected = [layer.experts(*call) for call in calls]
    torch.cuda.synchronize()
    start = Barrier(2)

    def caller(number: int) -> list[torch.Tensor]:
        stream = torch.cuda.Stream(card) if own_stream else torch.cuda.default_stream(card)
        start.wait(60)
        with torch.cuda.stream(stream):
            found = [layer.experts(*calls[number]) for _ in range(30)]
        stream.synchronize()
        return found

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(caller, range(2)))
    for number, found in enumerate(results):
        for y in found:
            assert_same_bits(y, expected[number])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [0, 1, 8, 200])
def test_a_capture_takes_its_own_arena_and_no_eager_call_touches_it(backend, tokens, card, rng):
    layer = make(rng, card, backend)
    x = normal(rng, tokens, 256).to(card)
    expected, eager = layer(x), arena(card)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    assert workspace.captures_alive(card)
    for _ in range(3):
        graph.replay()
        eager.fill(0xFF)
        layer(x)
        assert_same_bits(y, expected)
    other = normal(rng, tokens, 256).to(card)
    right = layer(other)
    x.copy_(other)
    graph.replay()
    assert_same_bits(y, right)
    with pytest.raises(Unsupported, match="captured CUDA graphs may be alive"):
        layer.reserve(more_rows(layer))
    if backend == "cuda" and tokens:
        with pytest.raises(Unsupported, match="captured CUDA graph may read these experts"):
            layer.bank.arrange("canonical")
    elif backend == "cuda":  # an empty graph reads no experts
        layer.bank.arrange("canonical")
        assert layer.bank.layout == "canonical"


def test_graphs_of_one_stream_share_an_arena_and_outlive_each_other(card, rng):
    layer = make(rng, card)
    inputs = [normal(rng, tokens, 256).to(card) for tokens in (1, 64)]
    expected = [layer(x) for x in inputs]
    torch.cuda.synchronize()
    graphs, ys = [], []
    for x in inputs:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            ys.append(layer(x))
    captured = [held for (_, c), held in workspace._of(card).arenas.items() if c]
    assert len(captured) == 1 and captured[0].nbytes >= layer.workspace_bytes()
    for turn in (0, 1, 0, 1):
        graphs[turn].replay()
        assert_same_bits(ys[turn], expected[turn])
    graphs.pop(0)  # its pool goes; the arena, which lay in it, stays
    torch.cuda.empty_cache()
    poison = torch.full((1 << 26,), float("nan"), device=card)
    graphs[0].replay()
    assert_same_bits(ys[1], expected[1])
    del poison


def test_a_larger_layer_after_a_capture(card, rng):
    layer = make(rng, card)
    x = normal(rng, 9, 256).to(card)
    expected = layer(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    larger = make(rng, card, rows=more_rows(layer))
    other = larger(x)
    torch.cuda.synchronize()
    second = torch.cuda.CUDAGraph()
    with torch.cuda.graph(second):
        z = larger(x)
    graph.replay()
    second.replay()
    assert_same_bits(y, expected)
    assert_same_bits(z, other)


def test_orders_of_the_bytes(card, rng):
    layer = make(rng, card)
    assert layer.plan().backend == "cuda" and layer.bank.layout == "fragment"
    x = normal(rng, 9, 256).to(card)
    expected = layer(x)
    twin = copy.deepcopy(layer)
    assert twin.bank.layout == "canonical"
    twin.backend = twin.shared.backend = "triton"
    assert_same_bits(twin(x), expected)
    state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    for name, tensor in twin.state_dict().items():
        assert_same_bits(state[name], tensor, name)
    host = copy.deepcopy(layer).to("cpu")
    host.backend = host.shared.backend = "cpu"
    assert host(x.cpu()).isfinite().all()
    layer.load_state_dict(state)
    assert_same_bits(layer(x), expected)
    assert layer.bank.layout == "fragment"


@pytest.mark.two_gpu
def test_a_layer_of_another_card_than_the_current_one(card, rng):
    other = torch.device("cuda", 1 - card.index)
    layer = make(rng, card)
    moved = copy.deepcopy(layer).to(other)
    x = normal(rng, 9, 256)
    expected = layer(x.to(card))
    with torch.cuda.device(card):
        for _ in range(20):
            assert_same_bits(moved(x.to(other)).cpu(), expected.cpu())
            assert_same_bits(layer(x.to(card)), expected)
            assert torch.cuda.current_device() == card.index
