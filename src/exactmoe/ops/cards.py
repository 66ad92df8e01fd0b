"""What several cards add to the path of one, and its form by torch for the paths of a CPU."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from exactmoe.config import Numerics
from exactmoe.errors import Unsupported

_GROUPS = 8
_WORDS = {2: torch.int16, 4: torch.int32}
# Partial vectors are added as they are: no weight multiplies them.
_UNWEIGHTED = Numerics.preset("a8")
Word = tuple[Tensor, int, Tensor, int]


class CardOps(Protocol):
    """Ops of one backend. S slots, E experts, H hidden, T tokens. Outputs are given."""

    def look_up(self, expert_ids: Tensor, tables: Tensor, found: Tensor) -> None:
        """expert_ids int32 [S], tables int32 [N, E + 2] -> found int32 [N, S]: what each table has
        at the place of an id between -1 and E; ids beyond are taken as these.
        """

    def take_slots(self, owners: Tensor, card: int, returned: Tensor, slots: Tensor) -> None:
        """Into slots [S, H] those of `card`, from returned [S, H], as raw words; owners int32
        [S].
        """

    def count_served(self, owners: Tensor, own: Tensor, served: Tensor, lost: Tensor) -> None:
        """lost int64 [1] grows by how far the slots that cards served, own [1] and served [peers],
        are from those that owners int32 [S] names (-1: absent).
        """

    def combine_partials(
        self, vectors: Tensor, first_groups: Sequence[int], shared: Tensor | None, y: Tensor
    ) -> None:
        """vectors float32 [P, T, H], one for each complete subtree, ascending by the first of its
        groups -> y [T, H]; shared float32 [T, H] or None.
        """

    def carry(self, parts: Sequence[tuple[Tensor, Tensor]], word: Word | None = None) -> None:
        """Copies contiguous (source, target) from the memory of another card, as a kernel of this
        one; word: (source, place, target, place), one int32 more.
        """


class TorchCards:
    """By torch; vectors by the combine of a path."""

    def __init__(self, combine: Callable[..., None]) -> None:
        self._combine = combine

    def look_up(self, expert_ids: Tensor, tables: Tensor, found: Tensor) -> None:
        places = expert_ids.clamp(-1, tables.shape[1] - 2) + 1
        torch.index_select(tables, 1, places, out=found)

    def take_slots(self, owners: Tensor, card: int, returned: Tensor, slots: Tensor) -> None:
        words = _WORDS[slots.element_size()]
        kept = slots.view(words)
        torch.where((owners == card)[:, None], returned.view(words), kept, out=kept)

    def count_served(self, owners: Tensor, own: Tensor, served: Tensor, lost: Tensor) -> None:
        lost += ((owners >= 0).sum() - own.sum() - served.sum()).abs()

    def combine_partials(
        self, vectors: Tensor, first_groups: Sequence[int], shared: Tensor | None, y: Tensor
    ) -> None:
        # Vectors stand in for slots, each in the place of its first group.
        count, num_tokens, hidden = vectors.shape
        slots = vectors.transpose(0, 1).reshape(num_tokens * count, hidden)
        groups = torch.tensor(first_groups, dtype=torch.int32).expand(num_tokens, -1).contiguous()
        ones = torch.ones(num_tokens, count)  # read, but not multiplied by: no group comes twice
        self._combine(slots, (groups, ones), _GROUPS, _UNWEIGHTED, shared, y)

    def carry(self, parts: Sequence[tuple[Tensor, Tensor]], word: Word | None = None) -> None:
        raise Unsupported("a CPU has no kernel that reads another card's memory; allowed: copies")
