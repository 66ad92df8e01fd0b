"""Slots of each card, counted on the device: what enters which counter, and what never does."""

import dataclasses

import pytest
import torch

from card_layers import on_cards
from exactmoe import Limits
from exactmoe.bank import Partition
from exactmoe.errors import BitMismatch, ConfigError
from exactmoe.runtime.card_load import BINS, CardLoad, Load
from layers import assert_same_bits, layer_of, random_bank, random_call

NONE = (0,) * BINS


def bins(**counts: int) -> tuple[int, ...]:
    return tuple(counts.get(f"at{place}", 0) for place in range(BINS))


def record(load: CardLoad, served: tuple[int, ...], asked: int, rows: int, top_k: int) -> None:
    load.record(torch.tensor(served), torch.tensor(asked), rows, top_k)


def test_what_the_seed_counts():
    """An unknown split; one row of 3 and 5 slots; two rows of 12 and 8, in no histogram."""
    load = CardLoad(torch.device("cpu"), 2)
    assert load.snapshot() == Load(0, 0, 0, (0, 0), 0, 0, NONE, NONE)
    record(load, (3, 4), 8, 1, 8)
    unknown = load.snapshot()
    assert unknown == Load(1, 0, 1, (0, 0), 0, 0, NONE, NONE)
    record(load, (3, 5), 8, 1, 8)
    one = load.snapshot()
    assert one == Load(2, 1, 1, (3, 5), 5, 1, bins(at3=1), bins(at5=1))
    record(load, (12, 8), 20, 2, 10)
    assert load.snapshot().since(one) == Load(1, 1, 0, (12, 8), 12, 0, NONE, NONE)
    both = Load(2, 2, 0, (15, 13), 17, 1, bins(at3=1), bins(at5=1))
    assert load.snapshot().since(unknown) == both


def test_histograms_are_of_one_row_and_fewer_than_nine_slots():
    load = CardLoad(torch.device("cpu"), 3)
    record(load, (8, 0, 0), 8, 1, 8)
    record(load, (0, 4, 4), 8, 1, 8)
    record(load, (9, 0, 0), 9, 1, 9)
    found = load.snapshot()
    assert (found.calls, found.observed, found.one_row) == (3, 3, 2)
    assert found.slots == (17, 4, 4) and found.busiest == 21
    assert found.owner_histogram == bins(at0=1, at8=1)
    assert found.busiest_histogram == bins(at4=1, at8=1)


def test_a_difference_is_never_negative():
    earlier = Load(4, 3, 1, (9, 2), 9, 2, bins(at1=2), bins(at8=2))
    later = Load(7, 5, 2, (5, 6), 12, 3, bins(at1=1), bins(at8=5))
    assert later.since(earlier) == Load(3, 2, 1, (0, 4), 3, 1, NONE, bins(at8=3))
    with pytest.raises(ConfigError, match="of 3 cards; allowed: 2"):
        later.since(dataclasses.replace(earlier, slots=(1, 2, 3)))
    with pytest.raises(ConfigError, match="num_cards is 1; allowed: from 2"):
        CardLoad(torch.device("cpu"), 1)


@pytest.mark.parametrize("returns", ["slots", "partials"])
def test_calls_of_a_layer(rng, returns):
    layer = layer_of(random_bank(rng, "nvfp4", 8, 64, 64), 4, "cpu")
    cards = on_cards(layer, Partition.even(8, 2), returns, limits=Limits(max_rows=4))
    x, _, weights = random_call(rng, layer, 6)
    ids = torch.tensor([[0, 1, 2, 7], [4, 5, 6, 7], [-1, 0, 9, 3], [0, 1, 2, 3], [7, -1, 6, 1]])
    ids = torch.cat((ids, torch.full((1, 4), -1)))
    assert cards.card_load is None  # off by default
    expected = cards.experts(x, ids, weights)
    cards.card_load = CardLoad(cards.device, 2)
    assert_same_bits(cards.experts(x, ids, weights), expected)  # a piece of 4 tokens, one of 2
    for row in range(6):
        cards.experts(x[row : row + 1], ids[row : row + 1], weights[row : row + 1])
    found = cards.card_load.snapshot()
    assert (found.calls, found.observed, found.unobserved) == (8, 8, 0)
    assert found.slots == (2 * 10, 2 * 7)
    assert found.busiest == 9 + 2 + (3 + 4 + 2 + 4 + 2 + 0)
    assert found.one_row == 6
    assert found.owner_histogram == bins(at0=2, at1=1, at2=1, at3=1, at4=1)
    assert found.busiest_histogram == bins(at0=1, at2=2, at3=1, at4=2)
    cards.cards.tables[1].local[8] = -1  # expert 7: no card serves it
    cards.experts(x[:1], ids[:1], weights[:1])
    assert cards.card_load.snapshot().since(found) == Load(1, 0, 1, (0, 0), 0, 0, NONE, NONE)
    with pytest.raises(BitMismatch):
        cards.check()
