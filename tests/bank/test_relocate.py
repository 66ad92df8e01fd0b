"""The banks of a whole model are split in an order in which no card overflows."""

import pytest
import torch

from exactmoe.bank import ExpertBank, Partition, relocate, split_all
from exactmoe.bank.relocate import alternating
from exactmoe.errors import BitMismatch, ConfigError
from layers import assert_same_bits, random_bank

CPU = ["cpu", "cpu"]


def test_layers_of_different_cards_take_turns():
    assert alternating("AAABBB") == [0, 3, 1, 4, 2, 5]
    assert alternating("AABAB") == [0, 2, 1, 4, 3]
    assert alternating("AAA") == [0, 1, 2]
    assert alternating("") == []
    assert alternating("ABCABC") == [0, 1, 2, 3, 4, 5]
    assert sorted(alternating("ABBBBA")) == list(range(6))


def peak(order: list[int], homes: str) -> dict[str, float]:
    """Most layers' worth of experts on each card, if each layer is halved while its full bank is
    there.
    """
    held = {card: float(homes.count(card)) for card in "AB"}
    most = dict(held)
    for layer in order:
        for card in "AB":
            held[card] += 0.5
            most[card] = max(most[card], held[card])
        held[homes[layer]] -= 1
    return most


def test_no_card_ever_holds_more_than_a_layer_beyond_its_share():
    homes = "A" * 20 + "B" * 20
    assert peak(alternating(homes), homes) == {"A": 20.5, "B": 21.0}
    assert peak(list(range(40)), homes)["B"] == 30.5  # what an order by layer would need


def test_split_all(rng, monkeypatch):
    banks = [random_bank(rng, "nvfp4", 4, 64, 32) for _ in range(4)]
    copies = [bank.gate.codes.clone() for bank in banks]
    layouts = [(Partition.halves(4, layer % 2), CPU) for layer in range(4)]
    seen = []
    split = split_all(banks, layouts, lambda layer, found: seen.append((layer, found)))
    assert [layer for layer, _ in seen] == [0, 1, 2, 3]
    for layer, found in enumerate(split):
        assert found.partition == layouts[layer][0] and found is seen[layer][1]
        assert_same_bits(found.gate.codes, copies[layer])
        with pytest.raises(ConfigError, match="was released"):
            _ = banks[layer].gate


def test_memory_goes_back_to_the_devices(rng, monkeypatch):
    called = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: called.append("empty"))
    banks = [random_bank(rng, "nvfp4", 4, 64, 32)]
    split_all(banks, [(Partition.even(4, 2), CPU)])
    assert called == ["empty"]


def test_refusals(rng, monkeypatch):
    banks = [random_bank(rng, "nvfp4", 4, 64, 32) for _ in range(3)]
    with pytest.raises(ConfigError, match="layouts are 1; allowed: 3, one a bank"):
        split_all(banks, [(Partition.even(4, 2), CPU)])
    layouts = [(Partition.even(4, 2), CPU)] * 2 + [(Partition.even(8, 2), CPU)]
    with pytest.raises(ConfigError, match=r"of \(8, 2\) .* asks for \(4, 2\)"):
        split_all(banks, layouts)
    _ = [bank.gate for bank in banks]  # nothing was released

    def failing(bank, partition, cards, **keep):
        if bank is banks[1]:
            raise BitMismatch("planted")
        return original(bank, partition, cards, **keep)

    original = ExpertBank.split
    monkeypatch.setattr(ExpertBank, "split", failing)
    with pytest.raises(BitMismatch, match="planted"):
        split_all(banks, [(Partition.even(4, 2), CPU)] * 3)
    _ = banks[1].gate, banks[2].gate
    with pytest.raises(ConfigError, match="was released"):
        _ = banks[0].gate
    assert relocate.alternating([0]) == [0]
