"""split_all: the resident banks of a whole model, layer by layer, so that no card overflows."""

from collections.abc import Callable, Hashable, Sequence

import torch

from exactmoe.bank.expert_bank import ExpertBank
from exactmoe.bank.partition import Partition
from exactmoe.bank.split import SplitBank
from exactmoe.errors import ConfigError

Layout = tuple[Partition, Sequence[torch.device | str]]


def alternating(homes: Sequence[Hashable]) -> list[int]:
    """An order of layers in which their homes take turns, each home's layers ascending.

    A card that gave nothing away yet would otherwise get the experts of all layers of the others.
    """
    queues: dict[Hashable, list[int]] = {}
    for layer, home in enumerate(homes):
        queues.setdefault(home, []).append(layer)
    rounds = range(max(map(len, queues.values()), default=0))
    return [queue[turn] for turn in rounds for queue in queues.values() if turn < len(queue)]


def split_all(
    banks: Sequence[ExpertBank],
    layouts: Sequence[Layout],
    progress: Callable[[int, SplitBank], None] | None = None,
) -> list[SplitBank]:
    """Splits the bank of each layer (`ExpertBank.split`) and lets its memory go before the next;
    layers of different cards take turns. The freed memory is given back to the devices at the end.

    Args:
        banks: full, of each layer, on any device.
        layouts: of each layer, its partition and the device of each card, the owner first.
        progress: called with a layer and its split bank.

    Raises:
        ConfigError: there is not one layout a bank; or as `ExpertBank.split`.
        BitMismatch: a byte differs; the layers before are split, this one and later ones are whole.
    """
    if len(banks) != len(layouts):
        raise ConfigError(f"layouts are {len(layouts)}; allowed: {len(banks)}, one a bank")
    for bank, (partition, cards) in zip(banks, layouts, strict=True):
        partition.require(bank.num_experts, len(cards))
    found: dict[int, SplitBank] = {}
    try:
        for layer in alternating([bank.device for bank in banks]):
            partition, cards = layouts[layer]
            found[layer] = banks[layer].split(partition, cards)
            if progress is not None:
                progress(layer, found[layer])
    finally:
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
    return [found[layer] for layer in range(len(banks))]
