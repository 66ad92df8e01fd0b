"""RankedDense: a dense MLP whose output rows are spread over ranks, with the bits of one card."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from exactmoe import ops
from exactmoe.bank import ExactModule
from exactmoe.block import Block, Space
from exactmoe.config import Limits, Numerics, checked_swiglu_limit
from exactmoe.dense import DenseMLP, dense_path
from exactmoe.errors import ConfigError
from exactmoe.formats import PackedWeight
from exactmoe.ops import Path, Storage
from exactmoe.parallel.rank_bank import digest
from exactmoe.parallel.ranks import Ranks
from exactmoe.parallel.row_cut import RowCut
from exactmoe.plan import Explanation
from exactmoe.runtime.workspace import Region

_NAMES = ("gate", "up", "down")


class CutWeights(ExactModule):
    """This rank's rows of gate, up [I / R, H] and down [H / R, I] of a dense MLP."""

    def __init__(self, gate: PackedWeight, up: PackedWeight, down: PackedWeight) -> None:
        super().__init__()
        for name, weight in zip(_NAMES, (gate, up, down), strict=True):
            self.register_packed(name, weight)

    @property
    def device(self) -> torch.device:
        return self.gate.device

    @property
    def hidden_size(self) -> int:
        return self.gate.columns

    @property
    def intermediate_size(self) -> int:
        """I, of all ranks together."""
        return self.down.columns

    @property
    def gate(self) -> PackedWeight:
        return self.packed("gate")

    @property
    def up(self) -> PackedWeight:
        return self.packed("up")

    @property
    def down(self) -> PackedWeight:
        return self.packed("down")

    @property
    def nbytes(self) -> int:
        """Bytes on this rank."""
        return sum(buffer.nbytes for buffer in self.buffers())

    def weights(self) -> Iterator[PackedWeight]:
        for name in _NAMES:
            yield self.packed(name)

    def prepared_for(self, path: Path) -> tuple[Any, ...]:
        return tuple(self.prepared(name, path.name, path.prepare) for name in _NAMES)


class RankedDense(DenseMLP):
    """A dense MLP over ranks with replicated tokens: each computes its output rows with whole dots,
    and h and the results are gathered. Every rank calls it in the same order.

    Args:
        whole: gate, up [I, H] and down [H, I] of one expert, the same on every rank; this rank's
            rows are kept, as views (`copy`: copies, so that the rest may go).
        ranks: the processes.
        swiglu_limit, limits, backend, output: as of DenseMLP.

    Raises:
        ConfigError: the rows cannot be cut over so many ranks (`cuts` says it before), or the ranks
            disagree.
    """

    bank: CutWeights  # type: ignore[assignment]

    def __init__(
        self,
        whole: tuple[PackedWeight, PackedWeight, PackedWeight],
        ranks: Ranks,
        swiglu_limit: float | None = None,
        limits: Limits | None = None,
        backend: str = "auto",
        output: str = "bf16",
        copy: bool = False,
    ) -> None:
        Block.__init__(self, limits, backend)
        cut = cuts(whole, ranks.size)
        if cut is None:
            found = [(weight.format, weight.rows) for weight in whole]
            raise ConfigError(
                f"gate, up and down are {found} (format, rows), which {ranks.size} ranks cannot "
                "cut; allowed: a block of 16 rows (FP8: 128) for each rank, not MXFP4"
            )
        self.ranks, (self.inner, self.outer) = ranks, cut
        taken = [
            rows.taken(weight, ranks.rank)
            for weight, rows in zip(whole, (self.inner, self.inner, self.outer), strict=True)
        ]
        self.bank = CutWeights(*(_copied(weight) if copy else weight for weight in taken))
        self.swiglu_limit = checked_swiglu_limit(swiglu_limit)
        self.numerics = Numerics(output=output)
        self._ready()
        facts = {
            "its rows": (self.inner.bounds, self.outer.bounds),
            "its formats": [weight.format for weight in whole],
            "swiglu_limit": self.swiglu_limit,
            "max_rows": self.max_rows,
            "the backend": self.plan().backend,
            "its global scales": [_scalar(weight) for weight in whole],
        }
        ranks.agree(f"a dense MLP on {ranks}", facts)

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
    whole: tuple[PackedWeight, PackedWeight, PackedWeight], num_ranks: int
) -> tuple[RowCut, RowCut] | None:
    """How the rows of h and of y are cut; None where they cannot be."""
    gate, up, down = whole
    inner = [RowCut.of(weight.format, weight.rows, num_ranks) for weight in (gate, up)]
    outer = RowCut.of(down.format, down.rows, num_ranks)
    if inner[0] is None or inner[0] != inner[1] or outer is None:
        return None
    return inner[0], outer


def _copied(weight: PackedWeight) -> PackedWeight:
    scales = None if weight.scales is None else weight.scales.clone()
    return replace(weight, codes=weight.codes.clone(), scales=scales)


def _scalar(weight: PackedWeight) -> str:
    holder = torch.nn.Module()
    holder.register_buffer("x", weight.global_scale)
    return digest(holder)
