"""RankWire: what ranks know about each other, and the sizes of what they send.

Tokens are replicated (every rank has all of them, as in transformers' all-reduce form) or own (each
rank has its own, padded to one width for all). Ids stay global; each rank looks them up in a table
of its own, so that an expert of another rank is absent there.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from exactmoe.bank.partition import Partition, Subtree, group_of
from exactmoe.config import RETURNS, MoEConfig, Numerics
from exactmoe.errors import ConfigError
from exactmoe.formats.units import PIECE
from exactmoe.ops import Storage
from exactmoe.parallel.ranks import Ranks
from exactmoe.runtime.workspace import Region

TOKENS = ("replicated", "own")


@dataclass(frozen=True)
class RankTraffic:
    """Bytes that one rank receives in one piece, where gathers and sums run in rings.

    Attributes:
        tokens: rows, ids and weights of the other ranks; 0 where tokens are replicated.
        back: slots or partial vectors of the other ranks' experts.
    """

    tokens: int
    back: int


@dataclass(frozen=True, eq=False)
class RankPlacement:
    """How a model lies over ranks. None of it can change a bit.

    Attributes:
        ranks: the processes.
        partition: who owns which expert, in every layer; None: even.
        returns: "auto", "slots" or "partials", as of cards (config.Placement).
        cut_dense: shared experts and dense MLPs are cut by output rows where they can be, at the
            price of two gathers each; False: whole on every rank.
    """

    ranks: Ranks
    partition: Partition | None = None
    returns: str = "auto"
    cut_dense: bool = True

    def __post_init__(self) -> None:
        for name, kind in (("ranks", Ranks), ("cut_dense", bool)):
            if not isinstance(getattr(self, name), kind):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; allowed: a {kind.__name__}")

    def wire(self, num_experts: int) -> "RankWire":
        """How the ranks of a layer work together; tokens are replicated."""
        return RankWire(self.ranks, num_experts, self.partition, returns=self.returns)


class RankWire:
    """How the ranks of a layer work together.

    Args:
        ranks: the processes.
        partition: who owns which expert; "cards" of it are ranks. None: even.
        num_experts: of the layer.
        tokens: "replicated" or "own".
        returns: "auto", "slots" or "partials", as of cards (config.Placement).

    Attributes:
        local: int32 [E + 2], at place id + 1: the id among the experts of this rank, -1 for those
            of others; at the place of E the number of its experts, which its route table finds out
            of range.
        owned: bool [E + 2], whether the expert is of this rank.
        subtree_ids: for each vector that this rank gives, the id itself where it belongs to it,
            else -1.

    Raises:
        ConfigError: the partition is of other experts or ranks; partials were asked for and two
            ranks share a group of the combine; a value that is not allowed.
    """

    def __init__(
        self,
        ranks: Ranks,
        num_experts: int,
        partition: Partition | None = None,
        tokens: str = "replicated",
        returns: str = "auto",
    ) -> None:
        for name, value, allowed in (("tokens", tokens, TOKENS), ("returns", returns, RETURNS)):
            if value not in allowed:
                raise ConfigError(f"{name} is {value!r}; allowed: {', '.join(allowed)}")
        if partition is None:
            partition = Partition.even(num_experts, ranks.size)
        partition.require(num_experts, ranks.size)
        if returns == "partials" and not partition.is_aligned:
            raise ConfigError(
                f"returns is 'partials' and the partition [{partition}] cuts through groups "
                f"{list(partition.shared_groups)} of the combine; allowed: 'slots', 'auto', or "
                "a partition of whole groups"
            )
        self.ranks, self.partition, self.tokens = ranks, partition, tokens
        found = partition.subtrees
        if returns == "auto":
            short = found is not None and all(len(vectors) == 1 for vectors in found)
            returns = "partials" if short else "slots"
        self.returns = returns
        self.subtrees: tuple[tuple[Subtree, ...], ...] = ((),) * ranks.size
        if returns == "partials" and found is not None:
            self.subtrees = found
        self._make_tables()

    @property
    def own_tokens(self) -> bool:
        """Whether each rank has tokens of its own."""
        return self.tokens == "own"

    @property
    def experts(self) -> tuple[int, ...]:
        """The experts of this rank, ascending."""
        return self.partition.experts[self.ranks.rank]

    @property
    def num_partials(self) -> int:
        """Vectors a token, of all ranks together."""
        return sum(map(len, self.subtrees))

    @property
    def most_partials(self) -> int:
        """Vectors a token that a rank sends: all send as many as the one with the most."""
        return max(map(len, self.subtrees))

    def rows(self, count: int) -> int:
        """Rows that a rank's experts work on when each rank's call has `count`."""
        return count * self.ranks.size if self.own_tokens else count

    def _make_tables(self) -> None:
        experts, device, rank = self.partition.num_experts, self.ranks.device, self.ranks.rank
        places = {expert: place for place, expert in enumerate(self.experts)}

        def table(values: Iterable[int], last: int) -> Tensor:
            with torch.inference_mode(False):
                return torch.tensor([-1, *values, last], dtype=torch.int32, device=device)

        ids = range(experts)
        self.local = table((places.get(e, -1) for e in ids), len(places))
        self.owned = table((e in places for e in ids), 0) > 0
        self.subtree_ids = tuple(
            table((e if 0 <= group_of(e, experts) - first < groups else -1 for e in ids), -1)
            for first, groups in self.subtrees[rank]
        )
        firsts = [first for vectors in self.subtrees for first, _ in vectors]
        with torch.inference_mode(False):
            self.first_groups = torch.tensor(firsts, dtype=torch.int32, device=device)

    def route_words(self, config: MoEConfig) -> int:
        """int32 words that go with a row of an own token: ids, weights, and `a8` its scales."""
        return 2 * config.top_k + _scales(config)

    def regions(self, rows: int, config: MoEConfig, storage: Storage) -> list[Region]:
        """What a rank needs in the workspace for a piece of `rows` tokens, beside its experts'
        arrays, which are for `self.rows(rows)`.
        """
        hidden, f32, i32 = config.hidden_size, torch.float32, torch.int32
        numerics, size = Numerics.of(config.numerics), self.ranks.size
        work, slots = self.rows(rows), self.rows(rows) * config.top_k
        regions = [
            Region("index", (slots,), i32),
            Region("local_ids", (slots,), i32),
            Region("mine", (slots,), torch.bool),
            Region("served", (2,), torch.int64),
        ]
        if self.returns == "partials":
            vectors, most = self.num_partials, self.most_partials
            regions += [
                Region("subtree_ids", (slots,), i32),
                Region("partials", (most * work * hidden,), f32),
                Region("everyone", (size * most * rows * hidden,), f32),
                Region("returned", (rows, vectors, hidden), f32),
                Region("groups", (rows, vectors), i32),
                Region("ones", (rows, vectors), f32),
            ]
        elif self.own_tokens:
            slot = storage.slots if numerics.slot == "bf16" else f32
            regions.append(Region("returned", (rows * config.top_k, hidden), slot))
        return regions + (self._token_regions(rows, config, storage) if self.own_tokens else [])

    def _token_regions(self, rows: int, config: MoEConfig, storage: Storage) -> list[Region]:
        a8 = Numerics.of(config.numerics).activation == "a8"
        hidden, work, words = config.hidden_size, self.rows(rows), self.route_words(config)
        values = storage.codes if a8 else storage.x
        regions = [
            Region("sent_rows", (rows, hidden), values),
            Region("all_rows", (work, hidden), values),
            Region("sent_routes", (rows * words,), torch.int32),
            Region("all_routes", (work * words,), torch.int32),
            Region("all_ids", (work * config.top_k,), torch.int32),
            Region("all_weights", (work * config.top_k,), torch.float32),
        ]
        if a8:
            regions.append(Region("all_scales", (work, hidden // PIECE), torch.float32))
        return regions

    def traffic(self, rows: int, config: MoEConfig, storage: Storage) -> RankTraffic:
        """Bytes of a piece of `rows` tokens (a rank's, where they are own), a closed form."""
        numerics, others = Numerics.of(config.numerics), self.ranks.size - 1
        tokens = 0
        if self.own_tokens:
            values = storage.codes if numerics.activation == "a8" else storage.x
            a_row = config.hidden_size * values.itemsize + 4 * self.route_words(config)
            tokens = others * rows * a_row
        if self.returns == "partials":
            a_vector = rows * config.hidden_size * torch.float32.itemsize
            return RankTraffic(tokens, others * self.most_partials * a_vector)
        slot = storage.slots if numerics.slot == "bf16" else torch.float32
        all_slots = rows * config.top_k * config.hidden_size * slot.itemsize
        if self.own_tokens:
            return RankTraffic(tokens, others * all_slots)
        return RankTraffic(tokens, 2 * others * all_slots // self.ranks.size)

    def describe(self, rows: int, config: MoEConfig, storage: Storage) -> list[str]:
        """A token's way through the ranks, a line each, for `explain`."""
        traffic, size, rank = self.traffic(rows, config, storage), self.ranks.size, self.ranks.rank
        if self.own_tokens:
            first = f"each rank's own {rows} tokens go to all ranks ({traffic.tokens} bytes in)"
        else:
            first = f"every rank has the {rows} tokens, routes them and runs its own experts"
        back = f"{self.returns} come back ({traffic.back} bytes in) and are combined in one order"
        lines = [f"{size} ranks, {self.partition.rule}; {first}; {back}"]
        for number, text in enumerate(self.partition.lines()):
            here = f", this process ({self.ranks.backend}, {self.ranks.device})"
            vectors = self._vectors(number)
            lines.append(f"rank{text.removeprefix('card')}{here * (number == rank)}{vectors}")
        return lines

    def _vectors(self, rank: int) -> str:
        parts = [
            f"{first}" if groups == 1 else f"{first}-{first + groups - 1}"
            for first, groups in self.subtrees[rank]
        ]
        return f", one vector a token for groups {' and '.join(parts)}" if parts else ""


def _scales(config: MoEConfig) -> int:
    a8 = Numerics.of(config.numerics).activation == "a8"
    return config.hidden_size // PIECE if a8 else 0
