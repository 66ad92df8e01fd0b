"""Cards: what several cards of one process know about each other, and the sizes of what they send.

Tokens live on card 0, their owner; the others are its peers. Ids stay global on the wire. Each card
looks them up in a table of its own, so that an expert of another card is absent there.
"""

from collections.abc import Iterable, Sequence
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
from exactmoe.runtime.workspace import Region

OWNER = 0


@dataclass(frozen=True, eq=False)
class Tables:
    """What a card looks up, at place id + 1 of an id between -1 and E: int32 [E + 2] each.

    Attributes:
        local: the id among its own experts; -1 for those of others. At the place of E, the owner's
            has the number of its experts, which its route table finds out of range.
        subtrees: for each vector that it sends back, the id itself where it belongs to it, else -1.
        owners: the card that owns the expert, else -1.
    """

    local: Tensor
    subtrees: tuple[Tensor, ...]
    owners: Tensor


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
        first_groups: int32 [vectors], the first group of each vector, by card, on the owner.

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
        self.first_groups = self._first_groups()

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

    @property
    def num_partials(self) -> int:
        """Vectors a token, of all cards together."""
        return sum(map(len, self.subtrees))

    def _tables(self, card: int) -> Tables:
        experts, device = self.partition.num_experts, self.devices[card]
        owned = self.partition.experts[card]
        local = dict(zip(owned, range(len(owned)), strict=True))
        beyond = len(owned) if card == OWNER else -1

        def table(values: Iterable[int], last: int = -1) -> Tensor:
            with torch.inference_mode(False):
                return torch.tensor([-1, *values, last], dtype=torch.int32, device=device)

        ids = range(experts)
        return Tables(
            table((local.get(e, -1) for e in ids), beyond),
            tuple(
                table(e if 0 <= group_of(e, experts) - first < groups else -1 for e in ids)
                for first, groups in self.subtrees[card]
            ),
            table(self.partition.owners),
        )

    def _first_groups(self) -> Tensor:
        firsts = [first for subtrees in self.subtrees for first, _ in subtrees]
        with torch.inference_mode(False):
            return torch.tensor(firsts, dtype=torch.int32, device=self.devices[OWNER])

    def regions(self, card: int, rows: int, config: MoEConfig, storage: Storage) -> list[Region]:
        """What a card needs in the workspace beside its experts' own arrays."""
        slots, hidden, f32 = rows * config.top_k, config.hidden_size, torch.float32
        i32, numerics = torch.int32, Numerics.of(config.numerics)
        regions = [Region("index", (slots,), i32), Region("local_ids", (slots,), i32)]
        if self.returns == "partials":
            count = len(self.subtrees[card])
            regions.append(Region("subtree_ids", (slots,), i32))
            regions.append(Region("partials", (count, rows, hidden), f32))
        if card != OWNER:
            regions += self._message(rows, config, storage)
            return [*regions, Region("fault", (1,), torch.int64)]
        regions.append(Region("served", (self.num_cards + 2,), torch.int64))
        regions += [Region("card", (slots,), i32), Region("present", (slots,), torch.bool)]
        if self.returns == "partials":
            vectors = (rows, self.num_partials)
            regions.append(Region("returned", (*vectors, hidden), f32))
            return [*regions, Region("groups", vectors, i32), Region("ones", vectors, f32)]
        slot = storage.slots if numerics.slot == "bf16" else f32
        mine = Region("from_peer", (slots,), torch.bool)
        return [*regions, mine, Region("returned", (slots, hidden), slot)]

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


def arrays_of(card: int, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """The arrays of one card under their own names."""
    prefix = f"card{card}."
    return {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}


def _plain_bytes(region: Region) -> int:
    count = 1
    for size in region.shape:
        count *= size
    return count * region.dtype.itemsize
