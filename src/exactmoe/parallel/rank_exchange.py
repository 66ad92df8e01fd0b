"""exchange_ranks: the routed experts of one piece over ranks, from this rank's rows to its combine.

Every rank runs the program of one card over the experts that it owns. What comes back is words as
they are, or vectors of whole subtrees, so each rank's combine adds the same numbers in the same
order as one card would.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from exactmoe.bank.partition import GROUPS
from exactmoe.config import MoEConfig, Numerics
from exactmoe.formats.rows import Rows
from exactmoe.ops import Path
from exactmoe.parallel.dispatch import Answer, Message, Program
from exactmoe.parallel.rank_wire import RankWire
from exactmoe.runtime.spans import CallSpans, span

# Partial vectors are added as they are: no weight multiplies them.
_UNWEIGHTED = Numerics.preset("a8")


@dataclass(frozen=True, eq=False)
class Hall:
    """What one piece is exchanged with.

    Attributes:
        path: of the backend, the same on all ranks.
        arrays: of the workspace (`RankWire.regions` and the experts' own).
        config: of the layer.
        lost: int64 [1]; grows by slots of this rank's experts that it did not serve once.
        rows: tokens of the piece on every rank; of own tokens this rank may have fewer.
        spans: what records the steps of the piece, if somebody profiles it.
    """

    path: Path
    arrays: dict[str, Tensor]
    config: MoEConfig
    lost: Tensor
    rows: int
    spans: CallSpans | None = None

    def take(self, name: str, count: int) -> Tensor:
        """The first rows of an array."""
        return self.arrays[name][:count]


def exchange_ranks(
    wire: RankWire, hall: Hall, message: Message, start: Callable[[Message], Program]
) -> Answer:
    """Runs one piece on all ranks.

    Args:
        wire: of the layer.
        hall: workspace.
        message: this rank's tokens, with global ids.
        start: start(message) makes the route table from local ids and gives the program; the slots
            go to the array "slots".

    Raises:
        RankLost: a rank died, or does not answer in time.
    """
    with span(hall.spans, "dispatch"):
        work = _gathered(wire, hall, message) if wire.own_tokens else message
        count = work.ids.numel()
        index, local = hall.take("index", count), hall.take("local_ids", count)
        # An id of any value becomes a place of the tables, whose ends are for absent ones.
        torch.clamp(work.ids.reshape(-1), -1, wire.partition.num_experts, out=index).add_(1)
        torch.index_select(wire.local, 0, index, out=local)
    program = start(work._replace(ids=local.view(work.ids.shape)))
    program.gate_up()
    program.down()
    with span(hall.spans, "return"):
        mine = torch.index_select(wire.owned, 0, index, out=hall.take("mine", count))
        _count_served(hall, mine)
        if wire.returns == "partials":
            return _partials(wire, hall, work, message.ids.shape[0])
        return _slots(wire, hall, mine, message)


def _gathered(wire: RankWire, hall: Hall, message: Message) -> Message:
    """The tokens of all ranks, padded to the same number each: padding has no expert."""
    config, rows = hall.config, hall.rows
    (values, scales), (tokens, top_k) = (
        (message.rows.values, message.rows.scales),
        message.ids.shape,
    )
    work, words = wire.rows(rows), wire.route_words(config)
    sent, everyone = hall.take("sent_rows", rows), hall.take("all_rows", work)
    sent[:tokens].copy_(values)
    sent[tokens:].view(torch.uint8).zero_()
    wire.ranks.all_gather(sent, everyone)
    routes, all_routes = (
        hall.take("sent_routes", rows * words),
        hall.take("all_routes", work * words),
    )
    table = routes.view(rows, words)
    table.fill_(-1)
    table[:tokens, :top_k].copy_(message.ids)
    table[:tokens, config.top_k : config.top_k + top_k].copy_(message.weights.view(torch.int32))
    if scales is not None:
        table[:tokens, 2 * config.top_k :].copy_(scales.view(torch.int32))
    wire.ranks.all_gather(routes, all_routes)
    found = all_routes.view(work, words)
    ids = hall.take("all_ids", work * config.top_k).view(work, config.top_k)
    weights = hall.take("all_weights", work * config.top_k).view(work, config.top_k)
    ids.copy_(found[:, : config.top_k])
    weights.view(torch.int32).copy_(found[:, config.top_k : 2 * config.top_k])
    taken = None
    if scales is not None:
        taken = hall.take("all_scales", work)
        taken.view(torch.int32).copy_(found[:, 2 * config.top_k :])
    return Message(Rows(everyone, taken), ids, weights)


def _count_served(hall: Hall, mine: Tensor) -> None:
    """Compares, on the device, the slots that this rank served with those of its experts."""
    asked, served = hall.arrays["served"][:1], hall.arrays["served"][1:]
    torch.sum(mine, 0, dtype=torch.int64, out=asked[0])
    served.copy_(hall.arrays["offsets"][-1:])
    hall.lost.add_(asked.sub_(served).abs_())


def _slots(wire: RankWire, hall: Hall, mine: Tensor, message: Message) -> Answer:
    """Every slot of this rank's tokens as raw words: 0 where the expert is another rank's, merged.

    Words of absent slots are 0 everywhere, and no combine reads them.
    """
    config, top_k = hall.config, message.ids.shape[1]
    slots = hall.take("slots", mine.numel())
    words = slots.view(torch.int32)
    words.masked_fill_(mine.logical_not_()[:, None], 0)
    if wire.own_tokens:
        returned = hall.take("returned", hall.rows * config.top_k)
        wire.ranks.merge_own(words, returned.view(torch.int32))
        per_token = returned.view(hall.rows, config.top_k, -1)[: message.ids.shape[0]]
        slots = per_token[:, :top_k].reshape(-1, config.hidden_size)
    else:
        wire.ranks.merge(words)
    routed = (message.ids, message.weights)
    return Answer(slots, routed, config.num_experts, Numerics.of(config.numerics))


def _partials(wire: RankWire, hall: Hall, work: Message, num_tokens: int) -> Answer:
    """One vector for each subtree, in the place of its first group.

    The groups that a vector does not cover are +0 in its own combine, and so are, in the last one,
    all of its groups but the first: x + 0 = x, since no sum is -0.
    """
    rows, hidden, size = work.ids.shape[0], hall.config.hidden_size, wire.ranks.size
    most = wire.most_partials
    vectors = hall.take("partials", most * rows * hidden).view(most, rows, hidden)
    _combine_subtrees(wire, hall, work, vectors)
    everyone = hall.take("everyone", most * size * hall.rows * hidden)
    if wire.own_tokens:
        found = everyone.view(most, size, hall.rows, hidden)
        for vector in range(most):
            wire.ranks.exchange(vectors[vector], found[vector])
    else:
        wire.ranks.all_gather(vectors, everyone)
        found = everyone.view(size, most, hall.rows, hidden).transpose(0, 1)
    returned, place = hall.take("returned", num_tokens), 0
    for rank, subtrees in enumerate(wire.subtrees):
        for vector in range(len(subtrees)):
            returned[:, place].copy_(found[vector, rank, :num_tokens])
            place += 1
    groups, ones = (hall.take(name, num_tokens) for name in ("groups", "ones"))
    groups.copy_(wire.first_groups.expand_as(groups))
    ones.fill_(1.0)  # read, but neither multiplied by nor compared: no group comes twice
    return Answer(returned.view(-1, hidden), (groups, ones), GROUPS, _UNWEIGHTED)


def _combine_subtrees(wire: RankWire, hall: Hall, work: Message, vectors: Tensor) -> None:
    """float32 [T, H] for each subtree of this rank, from its slots."""
    config, count = hall.config, work.ids.numel()
    numerics = Numerics.of(config.numerics)
    slots, index, masked = (hall.take(name, count) for name in ("slots", "index", "subtree_ids"))
    for vector, table in enumerate(wire.subtree_ids):
        torch.index_select(table, 0, index, out=masked)
        routed = (masked.view(work.ids.shape), work.weights)
        hall.path.combine(slots, routed, config.num_experts, numerics, None, vectors[vector])
