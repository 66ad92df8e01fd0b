"""From what a caller asks for (cards, partition, returns) to banks on cards, or a refusal."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from exactmoe.bank import ExpertBank, Partition, SplitBank
from exactmoe.config import Placement
from exactmoe.errors import ConfigError, Unsupported
from exactmoe.parallel.cards import Cards
from exactmoe.plan.architectures import require_one_architecture
from exactmoe.runtime.devices import resolve


@dataclass(frozen=True, eq=False)
class Placed:
    """Where the experts of a layer are.

    Attributes:
        placement: as it was asked for, with devices, owners and returns resolved.
        bank: the experts; split where there are several cards.
        cards: how several cards work together; None: there is one.
    """

    placement: Placement
    bank: ExpertBank | SplitBank
    cards: Cards | None


def place(
    bank: ExpertBank | SplitBank, placement: Placement | None, cards: Sequence[str] | None
) -> Placed:
    """Puts the experts of a layer where a caller wants them. A bank that is not split is copied
    and stays as it is; `bank.split` before lets its memory go.

    Raises:
        ConfigError: placement and cards were both given, the bank is elsewhere, its partition is
            another one, or the partition does not fit the experts, the cards or the returns.
        Unsupported: cards that are neither all CPUs nor all GPUs, or GPUs that do not give each
            other the bytes that were sent.
    """
    if placement is not None and cards is not None:
        raise ConfigError(
            "placement and cards were both given; allowed: one of them "
            "(cards is short for a Placement)"
        )
    if placement is None:
        names = cards if cards is not None else _own_cards(bank)
        placement = Placement(cards=tuple(names))
    devices = devices_of(placement)
    if isinstance(bank, SplitBank):
        return _over_split(bank, placement, devices)
    if devices[0] != bank.device:
        raise ConfigError(
            f"card is {placement.cards[0]!r}; the bank's weights are on {bank.device}"
        )
    partition = partition_of(placement, bank.num_experts)
    if len(devices) == 1:
        return Placed(replace(placement, cards=(str(devices[0]),)), bank, None)
    return _over_split(bank.split(partition, devices, keep=True), placement, devices)


def devices_of(placement: Placement) -> list[torch.device]:
    """The device of each card.

    Raises:
        Unsupported: some are CPUs and some GPUs.
        ConfigError: GPUs of several architectures, whose bits differ.
    """
    devices = [resolve(name) for name in placement.cards]
    if len({device.type for device in devices}) > 1:
        raise Unsupported(f"cards are {placement.cards}; allowed: all cpu, or all GPUs")
    require_one_architecture(devices)
    return devices


def partition_of(placement: Placement, num_experts: int) -> Partition:
    """The partition that a placement asks for; "even" if it names none."""
    num_cards, asked = len(placement.cards), placement.partition
    if asked == "fit":
        raise ConfigError(
            "partition is 'fit', which load_model and load_layer turn into numbers when they know "
            "what is free; allowed here: even, or the card's number of each expert"
        )
    if asked is None or isinstance(asked, str):
        return Partition.even(num_experts, num_cards)
    partition = Partition(tuple(asked))
    partition.require(num_experts, num_cards)
    return partition


def _own_cards(bank: ExpertBank | SplitBank) -> tuple[str, ...]:
    if isinstance(bank, SplitBank):
        return tuple(map(str, bank.cards))
    return (str(bank.device),)


def _over_split(bank: SplitBank, placement: Placement, devices: list[torch.device]) -> Placed:
    if bank.cards != tuple(devices):
        raise ConfigError(
            f"cards are {placement.cards}; the bank is split over {tuple(map(str, bank.cards))}"
        )
    partition = bank.partition
    if placement.partition is not None:
        asked = partition_of(placement, bank.num_experts)
        if asked != partition:
            raise ConfigError(
                f"the placement asks for the partition [{asked}]; the bank is split as "
                f"[{partition}]; allowed: the same one, or partition=None"
            )
    cards = Cards(partition, tuple(devices), placement.returns, placement.serial)
    resolved = replace(
        placement,
        cards=tuple(map(str, devices)),
        partition=partition.owners,
        returns=cards.returns,
    )
    return Placed(resolved, bank, cards)
