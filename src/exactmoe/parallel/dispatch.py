"""exchange: the routed experts of one piece on several cards, from the owner's rows to its combine.

The owner sends rows, global ids and weights; every card runs the program of one card over the
experts that it owns; what they send back makes the combine add the same numbers in the same order.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from exactmoe.bank.partition import GROUPS
from exactmoe.config import MoEConfig, Numerics
from exactmoe.errors import ConfigError
from exactmoe.formats.rows import Rows
from exactmoe.ops import Path
from exactmoe.parallel.cards import OWNER, Cards
from exactmoe.runtime.spans import CallSpans, span

# Partial vectors are added as they are: no weight multiplies them.
_UNWEIGHTED = Numerics.preset("a8")
_WORDS = {2: torch.int16, 4: torch.int32}


class Message(NamedTuple):
    """What a card works on: rows [T, H] in the form that gate_up reads, ids int32 and weights
    float32 [T, K].
    """

    rows: Rows
    ids: Tensor
    weights: Tensor


class Program(NamedTuple):
    """A card's own experts in two launches; its route table is made already."""

    gate_up: Callable[[], None]
    down: Callable[[], None]


class Answer(NamedTuple):
    """What the owner combines: the first four arguments of `Path.combine`."""

    slots: Tensor
    routed: tuple[Tensor, Tensor]
    num_experts: int
    numerics: Numerics


@dataclass(frozen=True, eq=False)
class Wire:
    """What one piece is exchanged with.

    Attributes:
        path: of the backend, the same on all cards.
        arrays: of the workspace, for each card (`Cards.regions` and its experts' own).
        config: of the layer.
        lost: int64 [1] on the owner; grows by the slots that no card, or more than one, has served.
        spans: what records the steps of the piece, if somebody profiles it.
    """

    path: Path
    arrays: tuple[dict[str, Tensor], ...]
    config: MoEConfig
    lost: Tensor
    spans: CallSpans | None = None

    def rows(self, card: int, name: str, count: int) -> Tensor:
        """The first rows of an array of a card."""
        return self.arrays[card][name][:count]


def exchange(
    cards: Cards, wire: Wire, message: Message, start: Callable[[int, Message], Program]
) -> Answer:
    """Runs one piece on all cards.

    Args:
        cards: the cards of the layer.
        wire: workspace.
        message: the owner's, with global ids.
        start: start(card, message) makes the route table of a card from local ids and gives its
            program; the slots go to the card's array "slots".
    """
    with span(wire.spans, "dispatch"):
        given = [message, *(_sent(wire, peer, message) for peer in cards.peers)]
        local = [_local_ids(cards, wire, card, part.ids) for card, part in enumerate(given)]
    programs = [
        start(card, part._replace(ids=ids))
        for card, (part, ids) in enumerate(zip(given, local, strict=True))
    ]
    if cards.serial:
        for program in programs:
            program.gate_up()
            program.down()
    else:
        # No card waits for another's down before its own gate_up is queued.
        for program in programs:
            program.gate_up()
        for program in programs:
            program.down()
    with span(wire.spans, "return"):
        _count_served(cards, wire, message.ids.numel())
        if cards.returns == "partials":
            return _partials(cards, wire, given)
        return _slots(cards, wire, message)


def copy_over(source: Tensor, target: Tensor, what: str) -> Tensor:
    """The bytes of a tensor to another card's memory of the same size.

    Raises:
        ConfigError: type or shape differ.
    """
    if (source.dtype, source.shape) != (target.dtype, target.shape):
        raise ConfigError(
            f"{what}: {source.dtype} {tuple(source.shape)} is sent into {target.dtype} "
            f"{tuple(target.shape)}; allowed: equal types and shapes"
        )
    return target.copy_(source)


def _sent(wire: Wire, peer: int, message: Message) -> Message:
    """The message in the memory of a peer."""

    def send(source: Tensor, name: str) -> Tensor:
        target = wire.rows(peer, name, source.numel() if source.ndim == 1 else source.shape[0])
        return copy_over(source, target, f"{name} of card {peer}")

    rows, (num_tokens, top_k) = message.rows, message.ids.shape
    if rows.scales is None:
        taken = Rows(send(rows.values, "x"), None)
    else:
        taken = Rows(send(rows.values, "x_codes"), send(rows.scales, "x_scales"))
    ids = send(message.ids.view(-1), "ids").view(num_tokens, top_k)
    weights = send(message.weights.view(-1), "weights").view(num_tokens, top_k)
    return Message(taken, ids, weights)


def _local_ids(cards: Cards, wire: Wire, card: int, ids: Tensor) -> Tensor:
    """Global ids [T, K] -> ids among the card's own experts; -1 for those of others."""
    count = ids.numel()
    index = wire.rows(card, "index", count)
    # An id of any value becomes a place of the tables, whose ends are for absent ones.
    torch.clamp(ids.view(-1), -1, cards.partition.num_experts, out=index).add_(1)
    local = wire.rows(card, "local_ids", count)
    torch.index_select(cards.tables[card].local, 0, index, out=local)
    return local.view(ids.shape)


def _count_served(cards: Cards, wire: Wire, num_slots: int) -> None:
    """Compares, on the owner's device, the slots that the cards served with those of the call."""
    served = wire.arrays[OWNER]["served"]
    for card in range(cards.num_cards):
        served[card : card + 1].copy_(wire.arrays[card]["offsets"][-1:])
    owners, present = (wire.rows(OWNER, name, num_slots) for name in ("card", "present"))
    index = wire.rows(OWNER, "index", num_slots)
    torch.index_select(cards.tables[OWNER].owners, 0, index, out=owners)
    torch.ge(owners, 0, out=present)
    asked, found = served[-2], served[-1]
    torch.sum(present, 0, dtype=torch.int64, out=asked)
    torch.sum(served[: cards.num_cards], 0, out=found)
    wire.lost.add_(asked.sub_(found).abs_())


def _slots(cards: Cards, wire: Wire, message: Message) -> Answer:
    """Every slot of the call on the owner, those of peers as raw words."""
    count = message.ids.numel()
    slots, returned = (wire.rows(OWNER, name, count) for name in ("slots", "returned"))
    owners, from_peer = (wire.rows(OWNER, name, count) for name in ("card", "from_peer"))
    words = _WORDS[slots.element_size()]
    kept, landed = slots.view(words), returned.view(words)
    for peer in cards.peers:
        copy_over(wire.rows(peer, "slots", count), returned, f"slots of card {peer}")
        torch.eq(owners, peer, out=from_peer)
        torch.where(from_peer[:, None], landed, kept, out=kept)
    config = wire.config
    routed = (message.ids, message.weights)
    return Answer(slots, routed, config.num_experts, Numerics.of(config.numerics))


def _partials(cards: Cards, wire: Wire, given: list[Message]) -> Answer:
    """One vector for each subtree, in the place of its first group.

    The groups that a vector does not cover are +0 in its own combine, and so are, in the owner's,
    all of its groups but the first: x + 0 = x, since no sum is -0.
    """
    num_tokens = given[OWNER].ids.shape[0]
    returned = wire.rows(OWNER, "returned", num_tokens)
    place = 0
    for card, message in enumerate(given):
        for vector, part in enumerate(_vectors(cards, wire, card, message)):
            copy_over(part, returned[:, place], f"vector {vector} of card {card}")
            place += 1
    groups, ones = (wire.rows(OWNER, name, num_tokens) for name in ("groups", "ones"))
    groups.copy_(cards.first_groups.expand_as(groups))
    ones.fill_(1.0)  # read, but neither multiplied by nor compared: no group comes twice
    return Answer(returned.view(-1, returned.shape[2]), (groups, ones), GROUPS, _UNWEIGHTED)


def _vectors(cards: Cards, wire: Wire, card: int, message: Message) -> list[Tensor]:
    """float32 [T, H] for each subtree of a card, combined from its slots on it."""
    config, (num_tokens, top_k) = wire.config, message.ids.shape
    numerics = Numerics.of(config.numerics)
    slots, index, masked = (
        wire.rows(card, name, num_tokens * top_k) for name in ("slots", "index", "subtree_ids")
    )
    found = []
    for vector, table in enumerate(cards.tables[card].subtrees):
        torch.index_select(table, 0, index, out=masked)
        partial = wire.arrays[card]["partials"][vector, :num_tokens]
        routed = (masked.view(num_tokens, top_k), message.weights)
        wire.path.combine(slots, routed, config.num_experts, numerics, None, partial)
        found.append(partial)
    return found
