"""exchange: the routed experts of one piece on several cards, from the owner's rows to its combine.

The owner sends rows, global ids and weights; every card runs the program of one card over the
experts that it owns; what they send back makes the combine add the same numbers in the same order.

Each card has a lane (runtime/lanes.py). The host waits for none: a lane waits for a mark of another
where it reads what that one writes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from exactmoe.config import MoEConfig, Numerics
from exactmoe.errors import ConfigError, Unsupported
from exactmoe.formats.rows import Rows
from exactmoe.ops import Path
from exactmoe.parallel.cards import OWNER, Cards
from exactmoe.runtime.card_load import CardLoad
from exactmoe.runtime.devices import capturing
from exactmoe.runtime.lanes import Lanes
from exactmoe.runtime.spans import CallSpans, span


class Message(NamedTuple):
    """What a card works on: rows [T, H] in the form that gate_up reads, ids int32 and weights
    float32 [T, K].
    """

    rows: Rows
    ids: Tensor
    weights: Tensor


class Program(NamedTuple):
    """A card's own experts; its route table is made already. Where one launch computes both, it is
    gate_up's, and down does nothing.
    """

    gate_up: Callable[[], None]
    down: Callable[[], None]


class Answer(NamedTuple):
    """Slots that the owner combines: the first four arguments of `Path.combine`."""

    slots: Tensor
    routed: tuple[Tensor, Tensor]
    num_experts: int
    numerics: Numerics

    def into(self, path: Path, shared: Tensor | None, y: Tensor) -> None:
        """Adds all of a token, and its shared expert, to y [T, H]."""
        path.combine(*self, shared, y)


class Vectors(NamedTuple):
    """Partial sums that the owner combines: float32 [P, T, H], and the first group of each.

    spans: what records the steps of the piece, if somebody profiles it.
    """

    vectors: Tensor
    first_groups: tuple[int, ...]
    spans: CallSpans | None = None

    def into(self, path: Path, shared: Tensor | None, y: Tensor) -> None:
        """As `Answer.into`."""
        with span(self.spans, "combine"):
            path.cards.combine_partials(self.vectors, self.first_groups, shared, y)


@dataclass(frozen=True, eq=False)
class Wire:
    """What one piece is exchanged with.

    Attributes:
        path: of the backend, the same on all cards.
        arrays: of the workspace, for each card (`Cards.regions` and its experts' own).
        lanes: of the cards.
        config: of the layer.
        lost: int64 [1] on the owner; grows by the slots that no card, or more than one, has served.
        spans: what records the steps of the piece, if somebody profiles it.
        load: what counts the slots of each card, if somebody asked for it.
    """

    path: Path
    arrays: tuple[dict[str, Tensor], ...]
    lanes: Lanes
    config: MoEConfig
    lost: Tensor
    spans: CallSpans | None = None
    load: CardLoad | None = None

    def rows(self, card: int, name: str, count: int) -> Tensor:
        """The first rows of an array of a card."""
        return self.arrays[card][name][:count]

    def found(self, card: int, num_tables: int, num_slots: int) -> Tensor:
        """What a card has looked up: int32 [N, S]."""
        return self.rows(card, "found", num_tables * num_slots).view(num_tables, num_slots)


Start = Callable[[int, Message], Program]


def exchange(cards: Cards, wire: Wire, message: Message, start: Start) -> Answer | Vectors:
    """Runs one piece on all cards.

    Args:
        cards: the cards of the layer.
        wire: workspace.
        message: the owner's, with global ids.
        start: start(card, message) makes the route table of a card from local ids and gives its
            program; the slots go to the card's array "slots".

    Raises:
        Unsupported: an earlier call failed, or a graph cannot hold what these cards send.
    """
    run = _Exchange(cards, wire, message, start)
    with wire.lanes.call():
        with span(wire.spans, "dispatch"):
            run.send()
        run.work()
        with span(wire.spans, "return"):
            return run.vectors() if cards.returns == "partials" else run.slots()


def copy_over(source: Tensor, target: Tensor, what: str) -> Tensor:
    """The bytes of a tensor to another card's memory of the same size.

    Raises:
        ConfigError: type or shape differ.
    """
    _require_alike(source, target, what)
    return target.copy_(source)


def _require_alike(source: Tensor, target: Tensor, what: str) -> None:
    if (source.dtype, source.shape) != (target.dtype, target.shape):
        raise ConfigError(
            f"{what}: {source.dtype} {tuple(source.shape)} is sent into {target.dtype} "
            f"{tuple(target.shape)}; allowed: equal types and shapes"
        )


Part = tuple[Tensor, Tensor, str]


class _Exchange:
    """One piece under way."""

    def __init__(self, cards: Cards, wire: Wire, message: Message, start: Start) -> None:
        self.cards, self.wire, self.start = cards, wire, start
        self.path, self.lanes, self.config = wire.path, wire.lanes, wire.config
        self.num_tokens, self.top_k = message.ids.shape
        self.num_slots = message.ids.numel()
        self.given = [message, *(self._received(peer, message) for peer in cards.peers)]
        self.programs: dict[int, Program] = {}
        self.pulled = self._pulled()

    def _pulled(self) -> frozenset[int]:
        """The peers whose bytes are carried by a kernel of whoever receives them: in a capture
        those on other GPUs, since a graph cannot hold a copy between two.
        """
        home = self.cards.devices[OWNER]
        if not capturing(home):
            return frozenset()
        far = [(peer, pair) for peer, pair in enumerate(self.cards.links) if pair is not None]
        for peer, pair in far:
            if not all(way.direct for way in pair):
                raise Unsupported(
                    f"a CUDA graph cannot hold copies between {home} and "
                    f"{self.cards.devices[peer]}, which do not read each other's memory; allowed: "
                    "eager calls"
                )
        return frozenset(peer for peer, _ in far)

    def _received(self, peer: int, message: Message) -> Message:
        """The message in the memory of a peer."""
        rows, shape = message.rows, message.ids.shape

        def memory(name: str, count: int) -> Tensor:
            return self.wire.rows(peer, name, count)

        if rows.scales is None:
            taken = Rows(memory("x", self.num_tokens), None)
        else:
            count = self.num_tokens
            taken = Rows(memory("x_codes", count), memory("x_scales", count))
        ids, weights = (memory(name, self.num_slots).view(shape) for name in ("ids", "weights"))
        return Message(taken, ids, weights)

    def send(self) -> None:
        """The message to every peer."""
        owner = self.lanes[OWNER]
        for peer in self.cards.peers:
            parts = self._parts(peer)
            lane = self.lanes[peer]
            if peer in self.pulled:
                lane.wait(owner.mark())
                lane.put(lambda parts=parts: self._carry(parts))  # type: ignore[misc]
            else:
                owner.send(lambda parts=parts: _copy(parts), lane)  # type: ignore[misc]
                lane.wait(owner.mark())

    def _parts(self, peer: int) -> list[Part]:
        mine, theirs = self.given[OWNER], self.given[peer]
        name = "x" if mine.rows.scales is None else "x_codes"
        parts = [(mine.rows.values, theirs.rows.values, f"{name} of card {peer}")]
        if mine.rows.scales is not None and theirs.rows.scales is not None:
            parts.append((mine.rows.scales, theirs.rows.scales, f"x_scales of card {peer}"))
        parts.append((mine.ids, theirs.ids, f"ids of card {peer}"))
        return [*parts, (mine.weights, theirs.weights, f"weights of card {peer}")]

    def work(self) -> None:
        """All experts. No card's gate_up waits for another's, and all are queued before a down that
        is a launch of its own.
        """
        order = [*self.cards.peers, OWNER]  # what comes from far is asked for first
        if self.cards.serial:
            before = None
            for card in sorted(order):
                lane = self.lanes[card]
                if before is not None:
                    lane.wait(before)
                lane.put(self._begin(card))
                lane.put(self._end(card))
                before = lane.mark()
            return
        for card in order:
            self.lanes[card].put(self._begin(card))
        for card in order:
            self.lanes[card].put(self._end(card))

    def _begin(self, card: int) -> Callable[[], None]:
        message = self.given[card]

        def begin() -> None:
            tables = self.cards.tables[card].rows
            found = self.wire.found(card, tables.shape[0], self.num_slots)
            self.path.cards.look_up(message.ids.view(-1), tables, found)
            local = message._replace(ids=found[0].view(message.ids.shape))
            self.programs[card] = self.start(card, local)
            self.programs[card].gate_up()

        return begin

    def _end(self, card: int) -> Callable[[], None]:
        return lambda: self.programs[card].down()

    def slots(self) -> Answer:
        """Every slot of the call on the owner, those of peers as raw words."""
        owner = self.lanes[OWNER]
        slots, returned = (self.wire.rows(OWNER, n, self.num_slots) for n in ("slots", "returned"))
        for peer in self.cards.peers:
            if peer > 1:  # what the peer before has sent must have been taken
                self.lanes[peer].wait(owner.mark())
            theirs = self.wire.rows(peer, "slots", self.num_slots)
            self._return(peer, [(theirs, returned, f"slots of card {peer}")])
            owner.put(
                lambda peer=peer: self.path.cards.take_slots(  # type: ignore[misc]
                    self._owners, peer, returned, slots
                )
            )
        owner.put(self._count)
        message, config = self.given[OWNER], self.config
        routed = (message.ids, message.weights)
        return Answer(slots, routed, config.num_experts, Numerics.of(config.numerics))

    def vectors(self) -> Vectors:
        """One vector of every token for each complete subtree, on the owner."""
        returned = self.wire.arrays[OWNER]["returned"][:, : self.num_tokens]
        places: dict[int, list[Tensor]] = {card: [] for card in range(self.cards.num_cards)}
        for place, (_, card) in enumerate(self.cards.vectors):
            places[card].append(returned[place])
        owner = self.lanes[OWNER]
        sent: dict[int, list[Part]] = {}
        for peer in self.cards.peers:
            own = list(self.wire.arrays[peer]["partials"][:, : self.num_tokens].unbind())
            self.lanes[peer].put(self._combined(peer, own))
            sent[peer] = [
                (vector, target, f"vector {number} of card {peer}")
                for number, (vector, target) in enumerate(zip(own, places[peer], strict=True))
            ]
        owner.put(self._combined(OWNER, places[OWNER]))
        for peer, parts in sent.items():
            self._return(peer, parts)
        owner.put(self._count)
        firsts = tuple(first for first, _ in self.cards.vectors)
        return Vectors(returned, firsts, self.wire.spans)

    def _combined(self, card: int, into: list[Tensor]) -> Callable[[], None]:
        """The vectors of a card from its slots: in each the ids of other subtrees are absent."""
        message, config = self.given[card], self.config
        numerics = Numerics.of(config.numerics)
        slots = self.wire.rows(card, "slots", self.num_slots)
        found = self.wire.found(card, self.cards.tables[card].rows.shape[0], self.num_slots)

        def combine() -> None:
            for number, vector in enumerate(into):
                ids = found[1 + number].view(message.ids.shape)
                routed = (ids, message.weights)
                self.path.combine(slots, routed, config.num_experts, numerics, None, vector)

        return combine

    def _return(self, peer: int, parts: list[Part]) -> None:
        """Bytes from a peer, and how many slots it served; the owner goes on when they are here."""
        owner, lane = self.lanes[OWNER], self.lanes[peer]
        offsets, served = self.wire.arrays[peer]["offsets"], self.wire.arrays[OWNER]["served"]
        if peer in self.pulled:
            owner.wait(lane.mark())
            word = (offsets, offsets.shape[0] - 1, served, peer - 1)
            owner.put(lambda: self._carry(parts, word))
            return
        count = (offsets[-1:], served[peer - 1 : peer], f"count of card {peer}")
        lane.send(lambda: _copy([*parts, count]), owner)
        owner.wait(lane.mark())

    def _carry(
        self, parts: list[Part], word: tuple[Tensor, int, Tensor, int] | None = None
    ) -> None:
        for part in parts:
            _require_alike(*part)
        pairs = [(source, target) for source, target, _ in parts]
        if word is None:
            self.path.cards.carry(pairs)
            return
        self.path.cards.carry(pairs[:1], word)
        for pair in pairs[1:]:
            self.path.cards.carry([pair])

    @property
    def _owners(self) -> Tensor:
        """int32 [S]: the card of each slot, as the owner looked it up."""
        tables = self.cards.tables[OWNER].rows
        return self.wire.found(OWNER, tables.shape[0], self.num_slots)[-1]

    def _count(self) -> None:
        """Compares, on the owner's device, the slots that cards served with those of the call."""
        arrays = self.wire.arrays[OWNER]
        own, served = arrays["offsets"][-1:], arrays["served"]
        self.path.cards.count_served(self._owners, own, served, self.wire.lost)
        if self.wire.load is not None:
            counts, asked = torch.cat((own, served)).long(), (self._owners >= 0).sum()
            self.wire.load.record(counts, asked, self.num_tokens, self.top_k)


def _copy(parts: list[Part]) -> None:
    for source, target, what in parts:
        copy_over(source, target, what)
