"""The dimension `cards` of verify finds what several cards get wrong, and names the placement."""

import sys

from card_layers import on_cards
from exactmoe.bank import Partition
from exactmoe.parallel import dispatch
from exactmoe.proof import verify
from exactmoe.proof.dimensions.cards import placements
from small_layers import small_layer


def proved(layer, **settings):
    return verify(layer, widths=(1, 6), dimensions=["cards"], **settings)


def test_placements():
    assert [str(p).split(";")[0] for p in placements(8)] == [
        "even over 2",
        "even over 3",
        "even over 4",
        "even over 8",
        "halves, the first on card 1",
        "every other expert",
    ]
    assert [p.num_cards for p in placements(3)] == [2, 3, 2, 2]
    assert placements(1) == []


def test_right_layers(rng):
    for numerics in ("a16", "a8"):
        layer = small_layer(rng, numerics=numerics)
        report = proved(layer)
        assert report.ok
        # Placements, returns, schedules, entries, rows: every group has one expert.
        assert report.dimensions["cards"].comparisons == 6 * 2 * 2 * 2 * (1 + 6 + 65)
        assert proved(on_cards(layer, Partition.even(8, 3))).ok


def test_a_fault_between_cards_is_named(rng, monkeypatch):
    layer = small_layer(rng)
    copied = dispatch.copy_over

    def wrong(source, target, what):
        copied(source, target, what)
        return target.mul_(2) if what == "slots of card 1" else target

    monkeypatch.setattr(dispatch, "copy_over", wrong)
    report = proved(layer)
    (first,) = report.differences
    assert first.dimension == "cards"
    assert first.case == "block: 2 cards, even over 2, slots"


def test_a_layer_on_cards_is_compared_as_it_is(rng):
    cards = on_cards(small_layer(rng), Partition.even(8, 2))
    cards.cards.tables[1].local[5:9] = cards.cards.tables[1].local[5:9].flip(0)
    report = proved(cards)
    assert [(d.dimension, d.case) for d in report.differences] == [("cards", "block: as it is")]


def test_of_large_layers_two_placements_and_one_schedule(rng, monkeypatch):
    monkeypatch.setattr(sys.modules["exactmoe.proof.dimensions.cards"], "_LARGE", 1)
    layer = small_layer(rng)
    assert proved(layer).dimensions["cards"].comparisons == 2 * 2 * 2 * (1 + 6 + 65)
