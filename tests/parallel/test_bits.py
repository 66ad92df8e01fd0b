"""Several cards give the bits of one: placements, returns, classes, widths, orders, schedules."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from card_layers import GUARD_BITS, GuardedLayer, guarded_room, on_cards, ways
from exactmoe import Limits, MoEConfig, MoELayer
from exactmoe.bank import Partition
from layers import CLASSES, assert_same_bits, layer_of, normal, random_bank, random_call
from seed_bank import seed_bank, seed_call
from small_layers import EXPERTS, VOCABULARY, small_layer

PARTITIONS = [
    Partition.even(EXPERTS, 2),
    Partition.halves(EXPERTS, 1),
    Partition.even(EXPERTS, 3),
    Partition.even(EXPERTS, 5),
    Partition.even(EXPERTS, 8),
    Partition.of_lists([[1, 3, 5, 7], [0, 2, 4, 6]], EXPERTS),
    Partition.of_lists([[3], [0, 1, 2, 4, 5, 6, 7]], EXPERTS),
]


@pytest.mark.parametrize("numerics", CLASSES)
@pytest.mark.parametrize("kind", ["score", "hash"])
def test_whole_block(rng, numerics, kind):
    layer = small_layer(rng, kind, numerics)
    x = normal(rng, 512, layer.config.hidden_size)
    x[3, 5] = float("nan")
    token_ids = torch.randint(0, VOCABULARY, (512,), generator=rng)
    widths = (1, 6, 32, 512)
    expected = [layer(x[:width], token_ids=token_ids[:width]) for width in widths]
    for partition in PARTITIONS:
        for returns in ways(partition):
            cards = on_cards(layer, partition, returns)
            for width, wanted in zip(widths, expected, strict=True):
                if width == 512 and partition.num_cards != 2:
                    continue
                found = cards(x[:width], token_ids=token_ids[:width])
                assert_same_bits(found, wanted, f"{partition.rule} {returns} {width}")


@pytest.mark.parametrize("numerics", CLASSES)
def test_4096_tokens_in_pieces(rng, numerics):
    layer = small_layer(rng, numerics=numerics)
    x, ids, weights = random_call(rng, layer, 4096)
    expected = layer.experts(x, ids, weights)
    cards = on_cards(layer, PARTITIONS[5], limits=Limits(max_rows=1000))
    assert_same_bits(cards.experts(x, ids, weights), expected)


@pytest.mark.parametrize("numerics", CLASSES)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_serial_and_every_backend(rng, numerics, backend):
    layer = small_layer(rng, numerics=numerics)
    x = normal(rng, 3, layer.config.hidden_size)
    expected = layer(x)
    for partition, serial in itertools.product(PARTITIONS[1:3], (False, True)):
        for returns in ways(partition):
            cards = on_cards(layer, partition, returns, serial, backend=backend)
            assert cards.plan().backend == backend
            assert_same_bits(cards(x), expected)


OWNERS = st.lists(st.integers(0, 4), min_size=EXPERTS, max_size=EXPERTS)


@settings(max_examples=60, deadline=None)
@given(OWNERS, st.integers(0, 2**31), st.sampled_from(CLASSES), st.integers(1, 9))
def test_any_partition_any_routes(owners, seed, numerics, tokens):
    """Ids may be absent or repeat; slots and, where they are possible, partials."""
    rng = torch.Generator().manual_seed(seed)
    numbers = sorted(set(owners))
    partition = Partition(tuple(numbers.index(owner) for owner in owners))
    layer = LAYERS[numerics]
    x = normal(rng, tokens, layer.config.hidden_size)
    ids = torch.randint(-1, EXPERTS, (tokens, 4), generator=rng, dtype=torch.int32)
    weights = torch.randn(tokens, 4, generator=rng)
    expected = layer.experts(x, ids, weights)
    order = torch.randperm(4, generator=rng)
    for returns in ways(partition):
        cards = on_cards(layer, partition, returns) if len(numbers) > 1 else layer
        assert_same_bits(cards.experts(x, ids, weights), expected)
        found = cards.experts(x, ids[:, order].contiguous(), weights[:, order].contiguous())
        assert_same_bits(found, expected)
        assert_same_bits(cards.experts(x[:1], ids[:1], weights[:1]), expected[:1])


def _layers() -> dict[str, MoELayer]:
    rng = torch.Generator().manual_seed(11)
    return {
        numerics: layer_of(
            random_bank(rng, "nvfp4", EXPERTS, 128, 128), 4, "cpu", numerics=numerics
        )
        for numerics in CLASSES
    }


LAYERS = _layers()


def test_aligned_partitions_of_whole_groups(rng):
    """16 experts are 8 groups of two: every owner of whole groups may return partial vectors."""
    layer = layer_of(random_bank(rng, "mxfp4", 16, 128, 128), 8, "cpu")
    x, ids, weights = random_call(rng, layer, 7)
    expected = layer.experts(x, ids, weights)
    for groups in ((0, 1, 1, 1, 0, 0, 1, 0), (0, 1, 2, 3, 3, 2, 1, 0), (1, 1, 1, 1, 1, 1, 1, 0)):
        partition = Partition(tuple(card for card in groups for _ in range(2)))
        cards = on_cards(layer, partition, "partials")
        assert_same_bits(cards.experts(x, ids, weights), expected)


def test_slots_in_float32(rng):
    bank = random_bank(rng, "nvfp4", EXPERTS, 64, 64)
    config = MoEConfig(64, 64, EXPERTS, 3, numerics={"slot": "f32", "output": "f32"})
    layer = MoELayer(config, bank, backend="cpu")
    x, ids, weights = random_call(rng, layer, 9)
    for partition in PARTITIONS:
        for returns in ways(partition):
            cards = on_cards(layer, partition, returns)
            assert_same_bits(cards.experts(x, ids, weights), layer.experts(x, ids, weights))


@pytest.mark.parametrize("numerics", CLASSES)
@pytest.mark.parametrize(
    ("hidden", "inner", "rows"), [(128, 256, (1, 6, 32)), (4096, 2048, (1, 6))]
)
def test_the_seeds_own_case(hidden, inner, rows, numerics):
    """8 experts, top-6: guard words behind every array, memory and output full of NaN before."""
    config = MoEConfig(hidden, inner, 8, 6, swiglu_limit=6.0, numerics=numerics)
    layer = MoELayer(config, seed_bank(hidden, inner), limits=Limits(max_rows=32))
    partition = Partition.even(8, 2)
    for tokens in rows:
        call = seed_call(tokens, hidden)
        expected = layer.experts(*call)
        assert len(expected.unique()) > 100
        for returns in ways(partition) if hidden < 1000 or tokens == 1 else ("partials",):
            limits = Limits(max_rows=32)
            cards = on_cards(layer, partition, returns, kind=GuardedLayer, limits=limits)
            cards.poison()
            room = guarded_room(tokens, hidden)
            out = room[17:-17].view(tokens, hidden)
            assert_same_bits(cards.experts(*call, out=out), expected)
            around = torch.cat((room[:17], room[-17:])).view(torch.int16)
            assert bool((around == 0x7FC5).all())
            for name, words in cards.guards().items():
                assert bool((words == GUARD_BITS).all()), name
