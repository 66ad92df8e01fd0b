"""Partition: which card owns which expert. Pure data: it names no device and cannot change a bit.

Experts are cut whole. The combine adds in 8 groups (contract section 5); a card that owns whole
groups may return one vector for each complete subtree of groups instead of its slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from exactmoe.errors import ConfigError

GROUPS = 8
# Cards for which a cut at ceil(r x E / R) falls between two groups.
_ALIGNED_CARDS = (1, 2, 4, 8)
Subtree = tuple[int, int]


def group_of(expert: int, num_experts: int) -> int:
    """The group of the combine that an expert belongs to."""
    return GROUPS * expert // num_experts


@dataclass(frozen=True)
class Partition:
    """Every expert has one owner, and every card owns at least one expert.

    Attributes:
        owners: card of each expert, by its id.
        rule: how it was made, for whoever reads it; two partitions with the same owners are equal.

    Raises:
        ConfigError: an owner is no card number, or a card below the highest one owns nothing.
    """

    owners: tuple[int, ...]
    rule: str = field(default="explicit map", compare=False)

    def __post_init__(self) -> None:
        owners = tuple(self.owners)
        for expert, card in enumerate(owners):
            if not isinstance(card, int) or isinstance(card, bool) or card < 0:
                raise ConfigError(
                    f"owner of expert {expert} is {card!r}; allowed: a card's number, from 0"
                )
        if not owners:
            raise ConfigError("owners are (); allowed: one card's number for each expert")
        idle = sorted(set(range(max(owners) + 1)) - set(owners))
        if idle:
            raise ConfigError(
                f"cards {idle} of {max(owners) + 1} own no expert ({self.rule}); allowed: at least "
                "one expert a card"
            )
        object.__setattr__(self, "owners", owners)

    @classmethod
    def even(cls, num_experts: int, num_cards: int) -> "Partition":
        """Consecutive experts, as equal as they can be: 288 over 5 is 58, 58, 58, 57, 57. For 1, 2,
        4 and 8 cards the cuts are at ceil(r x E / R), which no group of the combine crosses.
        """
        _require_cards(num_cards, num_experts)
        if num_cards in _ALIGNED_CARDS:
            cuts = [-(-card * num_experts // num_cards) for card in range(num_cards + 1)]
            counts = [high - low for low, high in zip(cuts, cuts[1:], strict=False)]
        else:
            base, more = divmod(num_experts, num_cards)
            counts = [base + (card < more) for card in range(num_cards)]
        return cls(_consecutive(counts), f"even over {num_cards}")

    @classmethod
    def halves(cls, num_experts: int, first: int = 0) -> "Partition":
        """Two cards; card `first` (0 or 1) owns the first half of the experts."""
        if first not in (0, 1) or isinstance(first, bool):
            raise ConfigError(f"first is {first!r}; allowed: 0, 1 (the card of the first half)")
        owners = cls.even(num_experts, 2).owners
        rule = f"halves, the first on card {first}"
        return cls(tuple(card ^ first for card in owners), rule)

    @classmethod
    def of_lists(cls, experts: Sequence[Sequence[int]], num_experts: int) -> "Partition":
        """The experts of each card, by card.

        Raises:
            ConfigError: an expert is missing, has two owners, or is none of the layer.
        """
        owners: dict[int, int] = {}
        for card, owned in enumerate(experts):
            for expert in owned:
                if type(expert) is not int or expert not in range(num_experts):
                    raise ConfigError(
                        f"card {card} owns expert {expert!r}; allowed: 0 to {num_experts - 1}"
                    )
                if expert in owners:
                    raise ConfigError(
                        f"expert {expert} is owned by card {owners[expert]} and again by card "
                        f"{card}; allowed: one owner an expert"
                    )
                owners[expert] = card
            if not owned:
                raise ConfigError(f"card {card} owns no expert; allowed: at least one a card")
        missing = sorted(set(range(num_experts)) - set(owners))
        if missing:
            raise ConfigError(
                f"experts {_ranges(missing)} of {num_experts} have no owner; "
                "allowed: one owner an expert"
            )
        return cls(tuple(owners[expert] for expert in range(num_experts)))

    @property
    def num_experts(self) -> int:
        return len(self.owners)

    @property
    def num_cards(self) -> int:
        return max(self.owners) + 1

    @cached_property
    def experts(self) -> tuple[tuple[int, ...], ...]:
        """The experts of each card, ascending: an expert's place there is its local id."""
        owned: list[list[int]] = [[] for _ in range(self.num_cards)]
        for expert, card in enumerate(self.owners):
            owned[card].append(expert)
        return tuple(map(tuple, owned))

    @property
    def counts(self) -> tuple[int, ...]:
        """How many experts each card owns."""
        return tuple(map(len, self.experts))

    @cached_property
    def _group_owners(self) -> tuple[frozenset[int], ...]:
        """The cards that own experts of each group."""
        found: list[set[int]] = [set() for _ in range(GROUPS)]
        for expert, card in enumerate(self.owners):
            found[group_of(expert, self.num_experts)].add(card)
        return tuple(map(frozenset, found))

    @property
    def shared_groups(self) -> tuple[int, ...]:
        """Groups of the combine of which two cards own experts."""
        return tuple(group for group, cards in enumerate(self._group_owners) if len(cards) > 1)

    @cached_property
    def subtrees(self) -> tuple[tuple[Subtree, ...], ...] | None:
        """For each card the largest complete subtrees of the combine's groups that it owns, as
        (first group, groups), ascending; None if two cards share a group. An empty group is +0, so
        whoever wants it may have it.
        """
        if self.shared_groups:
            return None
        found: list[list[Subtree]] = [[] for _ in range(self.num_cards)]

        def visit(first: int, groups: int) -> None:
            cards = frozenset().union(*self._group_owners[first : first + groups])
            if len(cards) == 1:
                found[min(cards)].append((first, groups))
            elif cards:
                visit(first, groups // 2)
                visit(first + groups // 2, groups // 2)

        visit(0, GROUPS)
        return tuple(map(tuple, found))

    @property
    def is_aligned(self) -> bool:
        """Whether no group of the combine is shared by two cards."""
        return self.subtrees is not None

    def require(self, num_experts: int, num_cards: int) -> None:
        """ConfigError unless it is one of a layer of that many experts on that many cards."""
        found, asked = (self.num_experts, self.num_cards), (num_experts, num_cards)
        if found != asked:
            raise ConfigError(
                f"the partition is of {found} (experts, cards); the layer asks for {asked}"
            )

    def lines(self) -> list[str]:
        """What each card owns, as text."""
        return [
            f"card {card}: {len(owned)} experts ({_ranges(owned)})"
            for card, owned in enumerate(self.experts)
        ]

    def __str__(self) -> str:
        return "; ".join([self.rule, *self.lines()])


def _require_cards(num_cards: object, num_experts: object) -> None:
    for name, value in (("num_experts", num_experts), ("num_cards", num_cards)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name} is {value!r}; allowed: an integer from 1")
    if num_cards > num_experts:  # type: ignore[operator]
        raise ConfigError(
            f"num_cards is {num_cards} for {num_experts} experts; allowed: 1 to {num_experts}"
        )


def _consecutive(counts: Sequence[int]) -> tuple[int, ...]:
    return tuple(card for card, count in enumerate(counts) for _ in range(count))


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as text: 0-3, 7."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)
