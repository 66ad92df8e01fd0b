"""Field faults A11 to A13, A19, A20, A24 to A26 with several cards on GPUs, and what goes wrong on
the way: copies, kernels and events that fail, links that lie, slots that no card serves.
"""

import gc
import inspect
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from card_layers import arenas_of, fill, on_cards, ways
from exactmoe import Limits, MoELayer, Placement, env
from exactmoe.bank import Partition
from exactmoe.errors import BitMismatch, ConfigError, Unsupported
from exactmoe.ops.triton.cards import TritonCards
from exactmoe.ops.triton_path import TritonPath
from exactmoe.parallel import dispatch, link, links
from exactmoe.proof.dimensions.memory import poison_allocator
from exactmoe.runtime.lanes import StreamLane
from gpu_cards import CARDS, CLASSES, captured
from gpu_layers import call, token_ids
from layers import assert_same_bits

EVEN = Partition.even(16, 2)
ODD = Partition(tuple(e % 2 for e in range(16)))
GPUS = CARDS[:2]


def build(name: str = "a16", **changes) -> MoELayer:
    return CLASSES[name].changed(max_rows=512, **changes).build("cuda:0")


@pytest.mark.parametrize("names", GPUS)
@pytest.mark.parametrize("numerics", CLASSES)
def test_a12_experts_that_cards_do_not_divide(names, numerics):
    layer = build(numerics, experts=288, top_k=8)
    for cards in (2, 3, 5, 6, 8):
        partition = Partition.even(288, cards)
        assert cards != 5 or partition.counts == (58, 58, 58, 57, 57)
        several = on_cards(layer, partition, names=names, limits=layer.limits)
        for tokens in (1, 6, 65):
            batch = call(layer, tokens)
            assert_same_bits(several.experts(*batch), layer.experts(*batch))


@pytest.mark.parametrize("names", GPUS)
@pytest.mark.parametrize("numerics", CLASSES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a13_ids(names, numerics, dtype):
    layer = build(numerics, top_k=2)
    rows = [[0, 15], [-1, 3], [-1, -1], [4, 4], [15, -1], [8, 0]]
    ids = torch.tensor(rows, dtype=dtype, device="cuda:0")
    x, _, weights = call(layer, 6)
    expected = layer.experts(x, ids, weights)
    assert not expected[2].view(torch.int16).any()
    for partition in (EVEN, ODD):
        for returns in ways(partition):
            cards = on_cards(layer, partition, returns, names=names, limits=layer.limits)
            fill(arenas_of(cards))
            assert_same_bits(cards.experts(x, ids, weights), expected)
            cards.check()
            wrong = ids.clone()
            wrong[1, 0], wrong[2, 1] = 16, -2
            assert_same_bits(cards.experts(x, wrong, weights), expected)
            with pytest.raises(ConfigError, match="an expert id was >= num_experts = 16"):
                cards.check()
            cards.check()


@pytest.mark.parametrize("names", GPUS)
@pytest.mark.parametrize("numerics", CLASSES)
def test_a19_a_card_without_work(names, numerics):
    """The peer owns none of the routed experts; old memory is 0, NaN, 3.4e38."""
    layer = build(numerics)
    for owner in (0, 1):
        partition = Partition.halves(16, owner)
        for returns in ways(partition):
            cards = on_cards(layer, partition, returns, names=names, limits=layer.limits)
            for tokens in (1, 5, 33, 257):
                x, ids, weights = call(layer, tokens)
                ids %= 8
                expected = layer.experts(x, ids, weights)
                for byte in (0x00, 0xFF, 0x7F):
                    fill(arenas_of(cards), byte)
                    assert_same_bits(cards.experts(x, ids, weights), expected)
            poison_allocator(torch.device("cuda:0"))
            assert_same_bits(cards.experts(x, ids, weights), expected)


@pytest.mark.parametrize("names", GPUS)
@pytest.mark.parametrize("numerics", CLASSES)
def test_a20_zero_tokens(names, numerics):
    layer = build(numerics)
    cards = on_cards(layer, EVEN, names=names, limits=layer.limits)
    x, ids, weights = call(layer, 4)
    given = token_ids(layer, 4)
    before = cards(x, given)

    def nothing():
        none = None if given is None else given[:0]
        return [cards(x[:0], none), cards.experts(x[:0], ids[:0], weights[:0])]

    for y in nothing():
        assert (tuple(y.shape), y.dtype) == ((0, 256), torch.bfloat16)
    graph, found = captured(lambda: [*nothing(), cards(x, given)])
    graph.replay()
    assert_same_bits(found[2], before)
    cards.check()


@pytest.mark.parametrize("names", GPUS)
def test_a24_two_hundred_repeats(names):
    layer = build()
    batch = call(layer, 33)
    expected = layer.experts(*batch)
    for partition in (EVEN, ODD):
        cards = on_cards(layer, partition, names=names, limits=layer.limits)
        wrong = torch.zeros((), dtype=torch.int64, device="cuda:0")
        for _ in range(200):
            y = cards.experts(*batch)
            wrong += (y.view(torch.int16) != expected.view(torch.int16)).sum()
        assert int(wrong) == 0


@pytest.mark.parametrize("names", GPUS)
@pytest.mark.parametrize("numerics", CLASSES)
@pytest.mark.parametrize("tokens", [1, 4, 8, 64])
def test_a25_fifty_replays(names, numerics, tokens):
    layer = build(numerics)
    cards = on_cards(layer, EVEN, names=names, limits=layer.limits)
    static = call(layer, tokens)
    graph, y = captured(lambda: cards.experts(*static))
    batches = [call(layer, tokens, seed) for seed in range(50)]
    batches[7][1].zero_()
    batches[8][1].fill_(-1)
    eager = [layer.experts(*batch) for batch in batches]
    devices = sorted({*cards.devices}, key=str)
    for device in devices:
        torch.cuda.synchronize(device)
    before = [torch.cuda.memory_allocated(device) for device in devices]
    for batch, expected in zip(batches, eager, strict=True):
        for part, given in zip(static, batch, strict=True):
            part.copy_(given)
        graph.replay()
        assert_same_bits(y, expected)
    assert [torch.cuda.memory_allocated(device) for device in devices] == before
    cards.check()


@pytest.mark.two_gpu
@pytest.mark.parametrize("numerics", CLASSES)
def test_a26_the_current_device(numerics):
    """Owner cuda:1, peer cuda:0, current cuda:0: in turn with the mirror, from threads, on other
    streams.
    """
    torch.cuda.set_device(0)
    first = build(numerics)
    batch = call(first, 33)
    expected = first.experts(*batch).cpu()
    layers = []
    for home in (0, 1):
        names = [f"cuda:{home}", f"cuda:{1 - home}"]
        bank = first.bank.split(EVEN, names, keep=True)
        layers.append(MoELayer(first.config, bank, limits=first.limits))
    given = [[part.to(f"cuda:{home}") for part in batch] for home in (0, 1)]

    def check(home: int) -> None:
        y = layers[home].experts(*given[home])
        assert y.device == torch.device("cuda", home)
        assert_same_bits(y.cpu(), expected)

    for turn in range(20):
        check(turn % 2)
    assert torch.cuda.current_device() == 0
    with ThreadPoolExecutor(2) as pool:
        for _ in range(10):
            list(pool.map(check, (0, 1)))
    for home in (0, 1):
        stream = torch.cuda.Stream(home)
        stream.wait_stream(torch.cuda.current_stream(home))
        with torch.cuda.stream(stream):
            check(home)
    torch.cuda.set_device(1)
    check(0)
    torch.cuda.set_device(0)


STEPS = {
    "copy_over": dispatch,
    "mark": StreamLane,
    "wait": StreamLane,
    "put": StreamLane,
    "begin": StreamLane,
    "end": StreamLane,
    "look_up": TritonCards,
    "take_slots": TritonCards,
    "count_served": TritonCards,
    "route_table": TritonPath,
    "gate_up": TritonPath,
    "down": TritonPath,
}


@pytest.mark.parametrize("names", GPUS)
@pytest.mark.parametrize("returns", ["slots", "partials"])
@pytest.mark.parametrize("step", STEPS)
def test_an_error_at_any_step(names, returns, step, monkeypatch):
    """All lanes are idle when the error arrives; calls are refused until a reset, then right."""
    if step == "take_slots" and returns == "partials":
        pytest.skip("vectors are not taken by slot")
    layer = CLASSES["a16"].changed(max_rows=512).build("cuda:0", "triton")
    cards = on_cards(layer, EVEN, returns, names=names, limits=Limits(max_rows=512))
    batch = call(layer, 300)
    expected = layer.experts(*batch)
    assert_same_bits(cards.experts(*batch), expected)
    gc.collect()  # what other tests left
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    original = inspect.getattr_static(STEPS[step], step)
    function = getattr(original, "__func__", original)
    kind = staticmethod if isinstance(original, staticmethod) else lambda f: f
    number = 0
    while True:
        calls: list = []

        def failing(*args, calls=calls, number=number):
            calls.append(None)
            if len(calls) == number + 1:
                raise RuntimeError("planted")
            return function(*args)

        with monkeypatch.context() as patch:
            patch.setattr(STEPS[step], step, kind(failing))
            try:
                cards.experts(*batch)
            except RuntimeError as error:
                assert str(error) == "planted"
                for lane in arenas_of(cards)[cards.device].lanes(cards.cards.devices)._lanes:
                    assert lane._stream.query()
            else:
                break
        with pytest.raises(Unsupported, match=r"failed \(RuntimeError: planted\); allowed"):
            cards.experts(*batch)
        cards.reset()
        number += 1
        assert_same_bits(cards.experts(*batch), expected, f"after {step} {number}")
        cards.check()
    assert number >= 1
    gc.collect()  # errors hold what their frames hold
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("names", GPUS)
@pytest.mark.parametrize("returns", ["slots", "partials"])
def test_a_capture_that_fails_leaves_the_layer_right(names, returns, monkeypatch):
    layer = build()
    cards = on_cards(layer, EVEN, returns, names=names, limits=layer.limits)
    batch = call(layer, 8)
    expected = layer.experts(*batch)
    cards.experts(*batch)
    path = cards_path(cards)
    steps = [("gate_up", "two"), ("down", "two")]
    steps += [("gate_up_down", "one")] * path.storage.one_launch
    for step, launches in steps:
        original = inspect.getattr_static(type(path), step)
        with monkeypatch.context() as patch, env.forced("EXACTMOE_EXPERTS", launches):

            def failing(*args):
                raise RuntimeError("planted")

            patch.setattr(type(path), step, failing)
            with pytest.raises(RuntimeError, match="planted"):
                captured_once(lambda: cards.experts(*batch))
        assert original is inspect.getattr_static(type(path), step)
        torch.cuda.synchronize()
        assert_same_bits(cards.experts(*batch), expected)
    graph, y = captured(lambda: cards.experts(*batch))
    graph.replay()
    assert_same_bits(y, expected)


def captured_once(run):
    """Without a call before it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()


def cards_path(cards: MoELayer):
    from exactmoe import ops

    return ops.path(cards.plan().path)


@pytest.mark.parametrize("names", GPUS)
def test_lost_slots_are_found_at_the_next_check(names):
    """Eager and in a replay; the word is read by `check` alone."""
    layer = build()
    for returns in ("slots", "partials"):
        cards = on_cards(layer, EVEN, returns, names=names, limits=layer.limits)
        batch = call(layer, 9)
        batch[1][2, 1] = 15
        graph, y = captured(lambda cards=cards, batch=batch: cards.experts(*batch))
        graph.replay()
        cards.check()
        local = cards.cards.tables[1].local
        was = int(local[16])
        local[16] = -1
        torch.cuda.synchronize(local.device)
        for run in (lambda cards=cards, batch=batch: cards.experts(*batch), graph.replay):
            run()
            with pytest.raises(BitMismatch, match="have not served each slot once"):
                cards.check()
            cards.check()
        local[16] = was
        torch.cuda.synchronize(local.device)
        graph.replay()
        cards.check()
        assert_same_bits(y, layer.experts(*batch))


@pytest.mark.parametrize("names", GPUS)
@pytest.mark.parametrize("tokens", [1, 64, 512])
def test_y_is_the_only_allocation(names, tokens):
    layer = build()
    for partition in (EVEN, ODD):
        cards = on_cards(layer, partition, names=names, limits=layer.limits)
        batch = call(layer, tokens)
        for run in (partial(cards.experts, *batch), partial(cards, batch[0])):
            run()
            for device in cards.devices:
                torch.cuda.synchronize(device)
            before = [count(device) for device in cards.devices]
            y = run()
            found = [count(device) - was for device, was in zip(cards.devices, before, strict=True)]
            assert found == [1] + [0] * (len(found) - 1) and y.shape == (tokens, 256)


def count(device: torch.device) -> int:
    return torch.cuda.memory_stats(device)["allocation.all.allocated"]


@pytest.mark.parametrize("names", GPUS)
def test_weights_written_between_calls(names):
    """In place, on each card's own current stream, with nothing waited for."""
    layer = build()
    layer.bank.arrange("canonical")
    split = layer.bank.split(ODD, names, keep=True)
    cards = MoELayer(layer.config, split, limits=layer.limits, backend="triton")
    batch = call(layer, 16)
    for _ in range(3):
        layer.bank.arrange("canonical")
        layer.bank.down_codes[1::2] ^= 0x11
        split[1].down_codes ^= 0x11
        found = cards.experts(*batch)
        assert_same_bits(found, layer.experts(*batch))


@pytest.mark.two_gpu
def test_links_are_tried_both_ways():
    pair = (torch.device("cuda:0"), torch.device("cuda:1"))
    for source, target in (pair, pair[::-1]):
        found = link(source, target)
        print(found)
        assert [rate.nbytes for rate in found.rates] == list(links.SIZES)
        assert found.rates[-1].bytes_per_second > 1e9


@pytest.mark.two_gpu
def test_a_link_that_changes_a_byte_is_refused(monkeypatch):
    def lying(source, target):
        target.copy_(source)
        if source.nbytes == 1 << 20:
            target[777] ^= 4

    links.link.cache_clear()
    layer = build()
    with monkeypatch.context() as patch:
        patch.setattr(links, "copied", lying)
        with pytest.raises(Unsupported, match="copies from cuda:0 to cuda:1: of 1048576 bytes"):
            MoELayer(layer.config, layer.bank, placement=Placement(("cuda:0", "cuda:1")))
    MoELayer(layer.config, layer.bank, placement=Placement(("cuda:0", "cuda:1")))


@pytest.mark.parametrize("names", GPUS)
def test_explain_names_cards_and_links(names):
    cards = on_cards(build(), EVEN, names=names, limits=Limits(max_rows=64))
    text = str(cards.explain(1))
    assert "card 1: 8 experts (8-15), on " + names[1] in text
    assert ("cuda:0 to cuda:1: " in text) == (names[0] != names[1])
