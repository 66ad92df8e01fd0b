"""Several cards give the bits of one: two streams of a GPU, two GPUs, and (small) CPUs.

Every placement, return, class and width, eager and captured, over memory full of NaN.
"""

import pytest
import torch
from torch import Tensor

from card_layers import GUARD_BITS, GuardedLayer, arenas_of, fill, guarded_room, on_cards, ways
from exactmoe import Limits, MoEConfig, MoELayer
from exactmoe.bank import Partition
from gpu_cards import CARDS, CLASSES, CPU, EXPERTS, captured
from gpu_layers import call, token_ids
from layers import assert_same_bits
from seed_bank import seed_bank, seed_call

PLACEMENTS = {
    "even": Partition.even(EXPERTS, 2),
    "halves": Partition.halves(EXPERTS, 1),
    "uneven": Partition(tuple(int(e >= 6) for e in range(EXPERTS))),
    "every other": Partition(tuple(e % 2 for e in range(EXPERTS))),
    "one alone": Partition(tuple(int(e != 5) for e in range(EXPERTS))),
}
MORE = {
    "three": Partition.even(EXPERTS, 3),
    "four": Partition.even(EXPERTS, 4),
    "four, mixed": Partition(tuple(e * 7 % 4 for e in range(EXPERTS))),
    "eight": Partition.even(EXPERTS, 8),
}
WIDTHS = (1, 6, 32, 512, 4096)


def widths_on(names: tuple[str, ...]) -> tuple[int, ...]:
    return WIDTHS if names != CPU else (1, 6)


def case(name: str, names: tuple[str, ...]) -> MoELayer:
    layer = CLASSES[name]
    return (layer if names != CPU else layer.changed(max_rows=8)).build(names[0])


@pytest.mark.parametrize("names", CARDS)
@pytest.mark.parametrize("numerics", ["a16", "a8"])
@pytest.mark.parametrize(
    ("hidden", "inner"), [(128, 256), pytest.param(4096, 2048, marks=pytest.mark.slow)]
)
def test_the_seeds_own_case(names, numerics, hidden, inner):
    """8 experts, top-6, rows 1, 6, 32; guard words behind every array of every card."""
    if names == CPU and hidden > 1000:
        pytest.skip("tests/parallel has it")
    config = MoEConfig(hidden, inner, 8, 6, swiglu_limit=6.0, numerics=numerics)
    limits = Limits(max_rows=32)
    layer = MoELayer(config, seed_bank(hidden, inner).to(names[0]), limits=limits)
    partition = Partition.even(8, 2)
    for returns in ways(partition):
        cards = on_cards(layer, partition, returns, names=names, kind=GuardedLayer, limits=limits)
        for tokens in (1, 6, 32):
            given = [part.to(names[0]) for part in seed_call(tokens, hidden)]
            expected = layer.experts(*given)
            assert len(expected.unique()) > 100
            for serial in (False, True):
                cards.cards.serial = serial
                cards.poison()
                room = guarded_room(tokens, hidden, names[0])
                out = room[17:-17].view(tokens, hidden)
                assert_same_bits(cards.experts(*given, out=out), expected)
                around = torch.cat((room[:17], room[-17:])).view(torch.int16)
                assert bool((around == 0x7FC5).all())
                for name, words in cards.guards().items():
                    assert bool((words == GUARD_BITS).all()), name
        cards.check()


@pytest.mark.parametrize("names", CARDS)
@pytest.mark.parametrize("numerics", CLASSES)
@pytest.mark.parametrize("placement", [*PLACEMENTS, *MORE])
def test_eager(names, numerics, placement):
    layer = case(numerics, names)
    partition = (PLACEMENTS | MORE)[placement]
    batches = [call(layer, tokens) for tokens in widths_on(names)]
    expected = [layer.experts(*batch) for batch in batches]
    blocks = [layer(batch[0], token_ids(layer, len(batch[0]))) for batch in batches]
    for returns in ways(partition):
        for serial in (False, True):
            cards = on_cards(layer, partition, returns, serial, names=names, limits=layer.limits)
            for batch, wanted, block in zip(batches, expected, blocks, strict=True):
                what = f"{placement} {returns} serial={serial} {len(batch[0])}"
                fill(arenas_of(cards))
                assert_same_bits(cards.experts(*batch), wanted, what)
                assert_same_bits(cards(batch[0], token_ids(cards, len(batch[0]))), block, what)
            cards.check()


@pytest.mark.parametrize("names", CARDS[:2])
@pytest.mark.parametrize("numerics", CLASSES)
@pytest.mark.parametrize("placement", [*PLACEMENTS, "four, mixed"])
def test_captured(names, numerics, placement):
    """Replays with other inputs, all tokens to one expert, and all absent."""
    layer = case(numerics, names)
    partition = (PLACEMENTS | MORE)[placement]
    for returns in ways(partition):
        cards = on_cards(layer, partition, returns, names=names, limits=layer.limits)
        for tokens in WIDTHS:
            static = call(layer, tokens, seed=5)
            held = {}

            def run(cards=cards, static=static, held=held):
                y = cards.experts(*static)
                held.update(arenas_of(cards))
                return y

            graph, y = captured(run)
            for seed in range(4):
                batch = call(layer, tokens, seed)
                if seed > 1:
                    batch[1].fill_(-1 if seed == 2 else 3)
                wanted = layer.experts(*batch)
                for part, given in zip(static, batch, strict=True):
                    part.copy_(given)
                fill(held)
                y.fill_(float("nan"))
                graph.replay()
                assert_same_bits(y, wanted, f"{placement} {returns} {tokens} {seed}")
        cards.check()


@pytest.mark.parametrize("names", CARDS[:2])
@pytest.mark.parametrize("numerics", CLASSES)
def test_the_whole_block_captured(names, numerics):
    """With router and shared expert on the stream beside, and serial as a control."""
    layer = case(numerics, names)
    for serial in (False, True):
        cards = on_cards(
            layer, PLACEMENTS["even"], "auto", serial, names=names, limits=layer.limits
        )
        for tokens in (1, 33, 512):
            x, given = call(layer, tokens)[0], token_ids(layer, tokens)
            graph, y = captured(lambda x=x, given=given, cards=cards: cards(x, given))
            for seed in (7, 8):
                x.copy_(call(layer, tokens, seed)[0])
                wanted = layer(x, given)
                y.fill_(float("nan"))
                graph.replay()
                assert_same_bits(y, wanted)


@pytest.mark.parametrize("names", CARDS)
def test_calls_wider_than_a_piece(names):
    layer = CLASSES["a16"].changed(max_rows=64).build(names[0])
    tokens = 300 if names != CPU else 70
    batch = call(layer, tokens)
    expected = layer.experts(*batch)
    for placement in ("even", "every other"):
        for returns in ways(PLACEMENTS[placement]):
            cards = on_cards(
                layer, PLACEMENTS[placement], returns, names=names, limits=layer.limits
            )
            for _ in range(3):
                assert_same_bits(cards.experts(*batch), expected)


@pytest.mark.parametrize("names", CARDS[:2])
def test_backends_of_a_gpu(names):
    """Fragment order on every card; and the portable path over canonical bytes."""
    settings = CLASSES["a16"]
    for backend in ("triton", "auto"):
        layer = settings.build("cuda:0", backend)
        cards = on_cards(layer, PLACEMENTS["uneven"], "slots", names=names, limits=layer.limits)
        assert cards.plan().backend == layer.plan().backend
        for tokens in WIDTHS:
            batch = call(layer, tokens)
            assert_same_bits(cards.experts(*batch), layer.experts(*batch))
        assert cards.bank.layout == layer.bank.layout


@pytest.mark.parametrize("names", CARDS[:2])
def test_streams_and_threads(names):
    """Calls of one layer at once from two streams, each with cards beside it."""
    from concurrent.futures import ThreadPoolExecutor

    layer = case("a16", names)
    cards = on_cards(layer, PLACEMENTS["even"], names=names, limits=layer.limits)
    batches = [call(layer, tokens, tokens) for tokens in (1, 40, 300)]
    expected = [layer.experts(*batch) for batch in batches]
    torch.cuda.synchronize()

    def work(number: int) -> list[Tensor]:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            found = [cards.experts(*batch) for _ in range(10) for batch in batches]
        stream.synchronize()
        return found

    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(work, range(2)):
            for place, y in enumerate(found):
                assert_same_bits(y, expected[place % 3])
