"""CardLoad: how many slots each card of a layer served, counted on the owner's device.

Counting is a few small launches into memory that was allocated before, so a captured graph counts
on every replay, and nothing is read before somebody asks. A layer without a CardLoad does nothing.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from exactmoe.errors import ConfigError

BINS = 9  # 0 to 8 slots
_CALLS, _OBSERVED, _UNOBSERVED, _BUSIEST, _ONE_ROW = range(5)
_SLOTS = 5


@dataclass(frozen=True)
class Load:
    """What was counted. A call that runs in pieces counts as one call a piece.

    Attributes:
        calls: all.
        observed: those whose slots were each served by one card; the rest counts these only.
        unobserved: the others; nothing of them is in what follows.
        slots: of each card, the owner first.
        busiest: slots of the busiest card of each call, summed.
        one_row: observed calls of one token with top_k < 9.
        owner_histogram, busiest_histogram: of these, how many had 0, 1, ... 8 slots on the owner,
            and on the busiest card.
    """

    calls: int
    observed: int
    unobserved: int
    slots: tuple[int, ...]
    busiest: int
    one_row: int
    owner_histogram: tuple[int, ...]
    busiest_histogram: tuple[int, ...]

    def since(self, earlier: "Load") -> "Load":
        """What came after an earlier snapshot of the same counters; never negative.

        Raises:
            ConfigError: of another number of cards.
        """
        if len(earlier.slots) != len(self.slots):
            raise ConfigError(
                f"the earlier snapshot is of {len(earlier.slots)} cards; allowed: {len(self.slots)}"
            )

        def less(now: int | tuple[int, ...], then: int | tuple[int, ...]) -> object:
            if isinstance(now, tuple) and isinstance(then, tuple):
                return tuple(max(a - b, 0) for a, b in zip(now, then, strict=True))
            assert isinstance(now, int) and isinstance(then, int)
            return max(now - then, 0)

        values = {
            f.name: less(getattr(self, f.name), getattr(earlier, f.name)) for f in fields(self)
        }
        return Load(**values)  # type: ignore[arg-type]


class CardLoad:
    """Counters of one layer. Its calls must be ordered: one stream at a time.

    Args:
        device: of the layer.
        num_cards: that it has.

    Raises:
        ConfigError: fewer than two cards.
    """

    def __init__(self, device: torch.device, num_cards: int) -> None:
        if num_cards < 2:
            raise ConfigError(f"num_cards is {num_cards}; allowed: from 2, a load is split then")
        self.num_cards = num_cards
        with torch.inference_mode(False):  # else it could not be written outside of that mode
            self._counts = torch.zeros(
                _SLOTS + num_cards + 2 * BINS, dtype=torch.int64, device=device
            )
            self._bins = torch.arange(BINS, device=device)

    def record(self, served: Tensor, asked: Tensor, num_tokens: int, top_k: int) -> None:
        """One call: served int64 [cards], asked int64 [], the slots of the call that some card
        owns. If these do not agree, the split is unknown.
        """
        counts, known = self._counts, (served.sum() == asked).long()
        counts[_CALLS].add_(1)
        counts[_OBSERVED].add_(known)
        counts[_UNOBSERVED].add_(1 - known)
        counts[_SLOTS : _SLOTS + self.num_cards].add_(served * known)
        busiest = served.max()
        counts[_BUSIEST].add_(busiest * known)
        if num_tokens != 1 or top_k >= BINS:
            return
        counts[_ONE_ROW].add_(known)
        histograms = counts[_SLOTS + self.num_cards :].view(2, BINS)
        for histogram, value in zip(histograms, (served[0], busiest), strict=True):
            histogram.add_((self._bins == value.clamp(max=BINS - 1)).long() * known)

    def snapshot(self) -> Load:
        """What was counted so far. Waits for the device."""
        values = self._counts.tolist()
        slots, rest = values[_SLOTS : _SLOTS + self.num_cards], values[_SLOTS + self.num_cards :]
        return Load(
            calls=values[_CALLS],
            observed=values[_OBSERVED],
            unobserved=values[_UNOBSERVED],
            slots=tuple(slots),
            busiest=values[_BUSIEST],
            one_row=values[_ONE_ROW],
            owner_histogram=tuple(rest[:BINS]),
            busiest_histogram=tuple(rest[BINS:]),
        )
