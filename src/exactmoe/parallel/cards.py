"""Cards: what several cards of one process know about each other, and the sizes of what they send.

Tokens live on card 0, their owner; the others are its peers. Ids stay global on the wire. Each card
looks them up in a table of its own, so that an expert of another card is absent there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from exactmoe.bank import Partition
from exactmoe.bank.partition import Subtree, group_of
from exactmoe.config import MoEConfig, Numerics
from exactmoe.errors import ConfigError
from exactmoe.formats.units import PIECE
from exactmoe.ops import Storage
from exactmoe.parallel.links import Link, link
from exactmoe.runtime.lanes import OWNER as OWNER
from exactmoe.runtime.workspace import Region


@dataclass(frozen=True, eq=False)
class Tables:
    """What a card looks up, at place id + 1 of an id between -1 and E.

    Attributes:
        rows: int32 [N, E + 2], all of them: `local`, one for each vector that the card gives a
            token, and on the owner `owners`.
    """

    rows: Tensor

    @property
    def local(self) -> Tensor:
        """The id among the card's own experts; -1 for those of others. At the place of E, the
        owner's has the number of its experts, which its route table finds out of range.
        """
        return self.rows[0]

    @property
    def owners(self) -> Tensor:
        """On the owner: the card that owns the expert, else -1."""
        return self.rows[-1]


@dataclass(frozen=True)
class Traffic:
    """Bytes between the owner and all its peers in one piece.

    Attributes:
        out: rows, ids and weights to the peers.
        back: slots or partial vectors from them. Each peer's count of served slots, one word, is
            not in it.
    """

    out: int
    back: int


class Cards:
    """The cards of a layer.

    Args:
        partition: who owns which expert.
        devices: of each card.
        returns: "auto", "slots" or "partials" (config.Placement).
        serial: one card after the other.

    Attributes:
        tables: of each card, on its device.

    Raises:
        ConfigError: partials were asked for and two cards share a group of the combine.
    """

    def __init__(
        self,
        partition: Partition,
        devices: tuple[torch.device, ...],
        returns: str = "auto",
        serial: bool = False,
    ) -> None:
        partition.require(partition.num_experts, len(devices))
        if returns == "partials" and not partition.is_aligned:
            raise ConfigError(
                f"returns is 'partials' and the partition [{partition}] cuts through groups "
                f"{list(partition.shared_groups)} of the combine; allowed: 'slots', 'auto', or "
                "a partition of whole groups"
            )
        self.partition, self.devices, self.serial = partition, devices, serial
        if returns == "auto":
            subtrees = partition.subtrees
            short = subtrees is not None and all(len(subtrees[peer]) == 1 for peer in self.peers)
            returns = "partials" if short else "slots"
        self.returns = returns
        # Made before any call, since a call that is captured may not make them.
        self.tables = tuple(self._tables(card) for card in range(self.num_cards))
        _ = self.links

    @property
    def num_cards(self) -> int:
        return len(self.devices)

    @property
    def peers(self) -> range:
        """The cards that are not the owner."""
        return range(1, self.num_cards)

    @cached_property
    def subtrees(self) -> tuple[tuple[Subtree, ...], ...]:
        """Of each card, the vectors that it gives a token; none where slots are returned."""
        found = self.partition.subtrees if self.returns == "partials" else None
        return ((),) * self.num_cards if found is None else found

    @cached_property
    def vectors(self) -> tuple[tuple[int, int], ...]:
        """(first group, card) of each vector of a token, ascending."""
        found = [(first, card) for card, of in enumerate(self.subtrees) for first, _ in of]
        return tuple(sorted(found))

    @property
    def links(self) -> tuple[tuple[Link, Link] | None, ...]:
        """Of each card how bytes go to it from the owner and back; None on the owner's device.

        Raises:
            Unsupported: bytes do not arrive as they were sent.
        """
        home = self.devices[OWNER]
        return tuple(None if d == home else (link(home, d), link(d, home)) for d in self.devices)

    def _tables(self, card: int) -> Tables:
        experts, device = self.partition.num_experts, self.devices[card]
        owned = self.partition.experts[card]
        local = dict(zip(owned, range(len(owned)), strict=True))
        ids = range(experts)
        rows = [[-1, *(local.get(e, -1) for e in ids), len(owned) if card == OWNER else -1]]
        for first, groups in self.subtrees[card]:
            own = (e if 0 <= group_of(e, experts) - first < groups else -1 for e in ids)
            rows.append([-1, *own, -1])
        if card == OWNER:
            rows.append([-1, *self.partition.owners, -1])
        with torch.inference_mode(False):  # else they could not be read outside of that mode
            return Tables(torch.tensor(rows, dtype=torch.int32, device=device))

    def regions(self, card: int, rows: int, config: MoEConfig, storage: Storage) -> list[Region]:
        """What a card needs in the workspace beside its experts' own arrays."""
        slots, hidden, f32 = rows * config.top_k, config.hidden_size, torch.float32
        tables = 1 + len(self.subtrees[card]) + (card == OWNER)
        regions = [Region("found", (tables * slots,), torch.int32)]
        if card != OWNER:
            if self.returns == "partials":
                regions.append(Region("partials", (len(self.subtrees[card]), rows, hidden), f32))
            regions += self._message(rows, config, storage)
            return [*regions, Region("fault", (1,), torch.int64)]
        regions.append(Region("served", (len(self.peers),), storage.index))
        if self.returns == "partials":
            return [*regions, Region("returned", (len(self.vectors), rows, hidden), f32)]
        slot = storage.slots if Numerics.of(config.numerics).slot == "bf16" else f32
        return [*regions, Region("returned", (slots, hidden), slot)]

    def _message(self, rows: int, config: MoEConfig, storage: Storage) -> list[Region]:
        """What a peer is sent: rows once, in the form that its gate_up reads, ids and weights."""
        slots, hidden, f32 = rows * config.top_k, config.hidden_size, torch.float32
        if Numerics.of(config.numerics).activation == "a8":
            sent = [
                Region("x_codes", (rows, hidden), storage.codes),
                Region("x_scales", (rows, hidden // PIECE), f32),
            ]
        else:
            sent = [Region("x", (rows, hidden), storage.x)]
        return [*sent, Region("ids", (slots,), torch.int32), Region("weights", (slots,), f32)]

    def traffic(self, rows: int, config: MoEConfig, storage: Storage) -> Traffic:
        """Bytes of a piece of `rows` tokens, a closed form."""
        message = sum(_plain_bytes(region) for region in self._message(rows, config, storage))
        if self.returns == "partials":
            vectors = sum(len(self.subtrees[card]) for card in self.peers)
            back = vectors * rows * config.hidden_size * torch.float32.itemsize
        else:
            narrow = Numerics.of(config.numerics).slot == "bf16"
            size = (storage.slots if narrow else torch.float32).itemsize
            back = len(self.peers) * rows * config.top_k * config.hidden_size * size
        return Traffic(len(self.peers) * message, back)

    def describe(self, rows: int, config: MoEConfig, storage: Storage) -> list[str]:
        """A token's way through the cards, a line each, for `explain`."""
        traffic = self.traffic(rows, config, storage)
        order = "one card after the other (serial)" if self.serial else "all cards at once"
        lines = [
            f"{self.num_cards} cards, {self.partition.rule}; {order}; a piece of {rows} tokens "
            f"sends {traffic.out} bytes out and {traffic.back} back as {self.returns}"
        ]
        for card, text in enumerate(self.partition.lines()):
            role = "owner of the tokens" if card == OWNER else "peer"
            lines.append(f"{text}, on {self.devices[card]}, {role}{self._vectors(card)}")
        lines += [str(way) for pair in dict.fromkeys(self.links) if pair for way in pair]
        return lines

    def _vectors(self, card: int) -> str:
        parts = [
            f"{first}" if groups == 1 else f"{first}-{first + groups - 1}"
            for first, groups in self.subtrees[card]
        ]
        return f", one vector a token for groups {' and '.join(parts)}" if parts else ""


def prefixed(card: int, regions: Sequence[Region]) -> list[Region]:
    """The regions under names of one card: cards of one device lie in one arena."""
    return [Region(f"card{card}.{r.name}", r.shape, r.dtype) for r in regions]


def card_of(region: Region) -> int:
    """The card whose name a region has; the owner where it has none."""
    head, dot, _ = region.name.partition(".")
    return int(head.removeprefix("card")) if dot and head.startswith("card") else OWNER


def arrays_of(card: int, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """The arrays of one card under their own names."""
    prefix = f"card{card}."
    return {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}


def _plain_bytes(region: Region) -> int:
    count = 1
    for size in region.shape:
        count *= size
    return count * region.dtype.itemsize
