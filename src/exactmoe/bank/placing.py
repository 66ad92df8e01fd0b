"""Partitions that are computed: by free memory (`fit`), and by recorded route loads (`by_load`)."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from exactmoe.bank.partition import Partition
from exactmoe.errors import ConfigError

# Later sweeps gain little: with 288 experts on two cards the fourth gained under 0.1 %.
SWEEPS = 4
# Of the mean busiest card; less is rounding.
_GAIN = 1e-12


def fit(
    num_experts: int,
    expert_bytes: int,
    free_bytes: Sequence[int],
    *,
    dense_bytes: Sequence[int],
    workspace_bytes: Sequence[int],
    kv_reserve_bytes: Sequence[int],
) -> Partition:
    """Consecutive experts, as many a card as keep its load nearest to its share of the free memory.

    The share of a card is in proportion to what is left of its free bytes after dense parts,
    workspace and the reserve for the KV cache. All are bytes by card; `expert_bytes` is of one
    expert in all layers together.

    Raises:
        ConfigError: a number is negative, the lists differ in length, the experts do not fit, or a
            card has no room for one.
    """
    parts = {
        "free_bytes": free_bytes,
        "dense_bytes": dense_bytes,
        "workspace_bytes": workspace_bytes,
        "kv_reserve_bytes": kv_reserve_bytes,
    }
    for name, values in parts.items():
        whole = all(isinstance(value, int) and value >= 0 for value in values)
        if not values or not whole or len(values) != len(free_bytes):
            raise ConfigError(
                f"{name} is {list(values)}; allowed: {len(free_bytes) or 'one or more'} integers "
                "from 0, one a card"
            )
    if not all(isinstance(count, int) and count >= 1 for count in (num_experts, expert_bytes)):
        raise ConfigError(
            f"num_experts is {num_experts!r}, expert_bytes {expert_bytes!r}; allowed: integers "
            "from 1"
        )
    left = [
        free - dense - workspace - reserve
        for free, dense, workspace, reserve in zip(*parts.values(), strict=True)
    ]
    rooms = [max(room, 0) // expert_bytes for room in left]
    for card, room in enumerate(rooms):
        if room < 1:
            raise ConfigError(
                f"card {card} has {left[card]} bytes for experts (free {free_bytes[card]} - dense "
                f"{dense_bytes[card]} - workspace {workspace_bytes[card]} - KV reserve "
                f"{kv_reserve_bytes[card]}); one expert takes {expert_bytes}"
            )
    if sum(rooms) < num_experts:
        raise ConfigError(
            f"the cards have room for {rooms} experts of {expert_bytes} bytes, together "
            f"{sum(rooms)}; the model has {num_experts}"
        )
    counts = _shares(num_experts, rooms)
    owners = tuple(card for card, count in enumerate(counts) for _ in range(count))
    reserves = ", ".join(map(str, kv_reserve_bytes))
    return Partition(owners, f"fit, with {reserves} bytes kept for the KV cache")


def _shares(num_experts: int, rooms: Sequence[int]) -> list[int]:
    """Whole numbers in proportion to the rooms, none above its room, none 0, sum num_experts."""
    if num_experts < len(rooms):
        raise ConfigError(
            f"there are {len(rooms)} cards for {num_experts} experts; allowed: 1 to {num_experts}"
        )
    total = sum(rooms)
    counts = [min(max(num_experts * room // total, 1), room) for room in rooms]
    while sum(counts) != num_experts:
        # The card that is farthest from its share gives or takes one; of equals the first.
        wanted = [
            num_experts * room / total - count for room, count in zip(rooms, counts, strict=True)
        ]
        step = 1 if sum(counts) < num_experts else -1
        able = [
            card
            for card, count in enumerate(counts)
            if (count < rooms[card] if step > 0 else count > 1)
        ]
        counts[max(able, key=lambda card: step * wanted[card])] += step
    return counts


def busiest(partition: Partition, loads: Tensor) -> float:
    """Mean over the recorded calls of the slots of the busiest card; loads [calls, E]."""
    loads = _checked(loads, partition.num_experts)
    return float(_slots_of(loads, partition.owners, partition.num_cards).amax(1).mean())


def by_load(loads: Tensor, num_cards: int, most: Sequence[int] | None = None) -> Partition:
    """A placement for which the busiest card of a call is expected to have few slots.

    Starts from the heaviest expert down, each to the card that it makes least busy, then exchanges
    experts while that helps: not always the least, and the same for the same input.

    Args:
        loads: [calls, E], or [E] for one: how many slots each expert served in each recorded call.
        num_cards: how many cards.
        most: experts that each card has room for; None: ceil(E / cards) each.

    Raises:
        ConfigError: loads that are no loads, or rooms that do not hold the experts.
    """
    loads = _checked(loads)
    num_experts = loads.shape[1]
    Partition.even(num_experts, num_cards)  # refuses numbers that no placement has
    rooms = [-(-num_experts // num_cards)] * num_cards if most is None else list(most)
    if len(rooms) != num_cards or min(rooms) < 1 or sum(rooms) < num_experts:
        raise ConfigError(
            f"most is {rooms} for {num_experts} experts on {num_cards} cards; allowed: one number "
            f"from 1 a card, together at least {num_experts}"
        )
    # Only this needs numba, which takes a second to import.
    from exactmoe.kernels.cpu import placing

    table, owners = loads.numpy(), np.zeros(num_experts, dtype=np.int64)
    # A stable sort: of equally heavy experts the first comes first.
    ranked = np.argsort(-table.sum(0), kind="stable")
    placing.spread(table, ranked, np.array(rooms, dtype=np.int64), owners)
    placing.exchange(table, owners, num_cards, SWEEPS, _GAIN)
    return Partition(tuple(owners.tolist()), f"by route loads of {len(loads)} calls")


def _checked(loads: Tensor, num_experts: int | None = None) -> Tensor:
    table = loads[None] if loads.ndim == 1 else loads
    good = table.ndim == 2 and min(table.shape) > 0 and not table.is_complex()
    good = good and num_experts in (None, table.shape[1])
    if not good or not bool(torch.isfinite(table.double()).all()) or bool((table < 0).any()):
        experts = "E" if num_experts is None else num_experts
        raise ConfigError(
            f"loads are {tuple(loads.shape)}; allowed: [calls, {experts}], finite, from 0"
        )
    return table.detach().cpu().double().contiguous()


def _slots_of(loads: Tensor, owners: Sequence[int], num_cards: int) -> Tensor:
    """float64 [calls, cards]"""
    cards = torch.zeros(len(loads), num_cards, dtype=torch.float64)
    return cards.index_add_(1, torch.tensor(owners), loads)
