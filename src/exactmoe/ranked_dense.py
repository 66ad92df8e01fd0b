"""RankedDense: a dense MLP whose output rows are spread over ranks, with the bits of one card."""

from collections.abc import Sequence
from dataclasses import replace
from math import gcd
from typing import Any

import torch
from torch import Tensor

from exactmoe import ops
from exactmoe.bank.projections import PROJECTIONS, Projections
from exactmoe.block import Block, Space
from exactmoe.config import Limits
from exactmoe.dense import DenseMLP, dense_path
from exactmoe.errors import ConfigError
from exactmoe.formats import PackedWeight
from exactmoe.ops import CANONICAL, Path, Storage
from exactmoe.parallel.ranks import Ranks
from exactmoe.parallel.row_cut import RowCut
from exactmoe.plan import (
    Explanation,
    Plan,
    TileChoice,
    choose,
    dense_tiles_of,
    mlp_tiles_of,
)
from exactmoe.runtime.workspace import Region


class CutWeights(Projections):
    """This rank's rows of gate, up [I / R, H] and down [H / R, I] of a dense MLP."""

    layout = CANONICAL

    def __init__(self, gate: PackedWeight, up: PackedWeight, down: PackedWeight) -> None:
        super().__init__()
        for name, weight in zip(PROJECTIONS, (gate, up, down), strict=True):
            self.register_packed(name, weight)

    def prepared_for(self, path: Path) -> tuple[Any, ...]:
        return tuple(self.prepared(name, path.name, path.prepare) for name in PROJECTIONS)


class RankedDense(DenseMLP):
    """A dense MLP over ranks with replicated tokens: each computes its output rows with whole dots,
    and h and the results are gathered. Every rank calls it in the same order.

    Args:
        own: this rank's rows of gate, up and down (`own_rows`).
        cut: how the rows of h and of y are cut (`cuts`).
        ranks: the processes.
        swiglu_limit, limits, backend, output: as of DenseMLP.

    Raises:
        ConfigError: the rows are others than the cut gives this rank, or the ranks disagree.
    """

    bank: CutWeights  # type: ignore[assignment]

    def __init__(
        self,
        own: tuple[PackedWeight, PackedWeight, PackedWeight],
        cut: tuple[RowCut, RowCut],
        ranks: Ranks,
        swiglu_limit: float | None = None,
        limits: Limits | None = None,
        backend: str = "auto",
        output: str = "bf16",
    ) -> None:
        Block.__init__(self, limits, backend)
        (gate, up, down), (inner, outer), rank = own, cut, ranks.rank
        found = [(weight.rows, weight.columns) for weight in own]
        rows = inner.count(rank)
        asked = [(rows, outer.rows), (rows, outer.rows), (outer.count(rank), inner.rows)]
        if found != asked:
            raise ConfigError(
                f"gate, up and down are {found} (rows, columns); the cut gives rank {rank} {asked}"
            )
        self.ranks, self.inner, self.outer = ranks, inner, outer
        self._hold(CutWeights(gate, up, down), swiglu_limit, output)  # type: ignore[arg-type]
        facts = {
            "its rows": (inner.bounds, outer.bounds),
            "its formats": [weight.format for weight in own],
            "swiglu_limit": self.swiglu_limit,
            "max_rows": self.max_rows,
            "the backend": self.plan().backend,
        }
        ranks.agree(f"a dense MLP on {ranks}", facts)

    def alone(self) -> DenseMLP:
        """The same MLP on one card of every rank, for proofs: a copy of all rows. Every rank has to
        call it.
        """
        gate, up, down = self.bank.weights()
        return DenseMLP(
            self._joined(gate, self.inner),
            self._joined(up, self.inner),
            self._joined(down, self.outer),
            self.swiglu_limit,
            self.limits,
            self.backend,
            self.numerics.output,
        )

    def _joined(self, weight: PackedWeight, cut: RowCut) -> PackedWeight:
        """All rows of a projection."""

        def joined(mine: Tensor) -> Tensor:
            # A row of scales is of one row of codes, or of a block of them.
            block = -(-cut.count(self.ranks.rank) // mine.shape[1])
            most = -(-cut.most // block)
            sent = mine.new_zeros(most, *mine.shape[2:])
            sent[: mine.shape[1]].copy_(mine[0])
            found = mine.new_empty(self.ranks.size, *sent.shape)
            self.ranks.all_gather(sent, found)
            counts = [-(-cut.count(rank) // block) for rank in range(self.ranks.size)]
            parts = [part[:count] for part, count in zip(found, counts, strict=True)]
            return torch.cat(parts)[None]

        scales = None if weight.scales is None else joined(weight.scales)
        return replace(weight, codes=joined(weight.codes), scales=scales)

    def regions(self, rows: int, storage: Storage) -> list[Region]:
        f32, size, inner, outer = torch.float32, self.ranks.size, self.inner, self.outer
        return [
            Region("x", (rows, self.hidden_size), storage.x),
            Region("dense_h", (rows, inner.rows), storage.h),
            Region("dense_h_mine", (rows * inner.most,), storage.h),
            Region("dense_h_all", (size * rows * inner.most,), storage.h),
            Region("dense_out", (rows, outer.rows), f32),
            Region("dense_out_mine", (rows * outer.most,), f32),
            Region("dense_out_all", (size * rows * outer.most,), f32),
        ]

    def plan(self) -> Plan:
        """As DenseMLP.plan and the same on every rank: rows that divide each rank's."""
        rows = gcd(*self.inner.bounds)
        pair = tuple(shape._replace(rows=rows) for shape in self.bank.shapes[:2])
        return choose(self.numerics, self.device, self.backend, dense=pair)

    def tiles(self, plan: Plan, num_tokens: int) -> tuple[TileChoice, ...]:
        """As DenseMLP.tiles, of this rank's rows; down is a linear layer."""
        *pair, down = self.bank.shapes
        linear = dense_tiles_of(plan, {"linear": down}, num_tokens)
        return mlp_tiles_of(plan, pair, num_tokens) + linear

    def explain(self, width: int = 8) -> Explanation:
        """As DenseMLP.explain, of this rank's rows."""
        h, y = (
            f"rows {part.start} to {part.stop - 1} of {name}"
            for name, part in (
                ("h", self.inner.part(self.ranks.rank)),
                ("y", self.outer.part(self.ranks.rank)),
            )
        )
        line = (
            f"{self.ranks}: output rows over the ranks, here {h} and {y}; both are gathered, no "
            "sum crosses ranks"
        )
        return replace(super().explain(width), cards=(line,))

    def run(self, space: Space, x: Tensor) -> Tensor:
        """As DenseMLP.run."""
        path, count = space.path, x.shape[0]
        gate, up, down = self.bank.prepared_for(dense_path(path))
        rank, limit = self.ranks.rank, self.swiglu_limit
        mine = space.rows("dense_h_mine", count * self.inner.most)
        own = mine[: count * self.inner.count(rank)].view(count, -1)
        path.dense_gate_up(x, (gate, up), limit, own)
        h = self._gathered(mine, space, "dense_h", self.inner)
        mine = space.rows("dense_out_mine", count * self.outer.most)
        own = mine[: count * self.outer.count(rank)].view(count, -1)
        path.dense_linear(h[:, None], down, own[:, None])
        return self._gathered(mine, space, "dense_out", self.outer)

    def _gathered(self, mine: Tensor, space: Space, name: str, cut: RowCut) -> Tensor:
        """The rows of all ranks beside each other, [T, rows]."""
        count = mine.numel() // cut.most
        everyone = space.rows(f"{name}_all", self.ranks.size * mine.numel())
        self.ranks.all_gather(mine, everyone)
        whole = space.rows(name, count)
        for rank, part in enumerate(everyone.view(self.ranks.size, -1)):
            whole[:, cut.part(rank)].copy_(part[: count * cut.count(rank)].view(count, -1))
        return whole

    def _prepare(self, path: ops.Path) -> None:
        self.bank.prepared_for(dense_path(path))


def cuts(
    formats: Sequence[str], hidden_size: int, intermediate_size: int, num_ranks: int
) -> tuple[RowCut, RowCut] | None:
    """How the rows of h and of y are cut over ranks; None where they cannot be.

    formats: of gate, up and down.
    """
    gate, up, down = formats
    inner = [RowCut.of(format, intermediate_size, num_ranks) for format in (gate, up)]
    outer = RowCut.of(down, hidden_size, num_ranks)
    if inner[0] is None or inner[0] != inner[1] or outer is None:
        return None
    return inner[0], outer


def own_rows(
    whole: tuple[PackedWeight, PackedWeight, PackedWeight], cut: tuple[RowCut, RowCut], rank: int
) -> tuple[PackedWeight, PackedWeight, PackedWeight]:
    """A rank's rows of gate, up [I, H] and down [H, I] of one expert: views."""
    (gate, up, down), (inner, outer) = whole, cut
    return inner.taken(gate, rank), inner.taken(up, rank), outer.taken(down, rank)
