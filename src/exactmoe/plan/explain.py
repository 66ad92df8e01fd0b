"""What `layer.explain()` says: the path, the numerics, the pieces, and the matrix units of each
projection.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from exactmoe import env
from exactmoe.config import Limits, Numerics
from exactmoe.formats import PackedWeight, fp8_exact
from exactmoe.plan.architectures import architecture_name
from exactmoe.plan.choose import Plan
from exactmoe.plan.tiles import TILES, TileChoice, choose_tile

PROJECTIONS = ("gate", "up", "down")


@dataclass(frozen=True)
class Explanation:
    """Which path runs a call of `width` tokens, and why.

    Attributes:
        max_rows: tokens that a piece may have.
        fp8_experts: of gate, up and down, how many experts the fp8 matrix units hold without losing
            a bit.
        tiles: of the ops of a piece; a CPU's are fixed and not named.
        switches: of the environment that are not at their default.
        cards: a token's way through several cards, a line each.
        names: of the weights.
    """

    plan: Plan
    numerics: Numerics
    width: int
    pieces: int
    max_rows: int
    formats: tuple[str, ...]
    num_experts: int
    fp8_experts: tuple[int, ...]
    tiles: tuple[TileChoice, ...] = ()
    switches: tuple[tuple[str, Any], ...] = ()
    cards: tuple[str, ...] = ()
    names: tuple[str, ...] = PROJECTIONS

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "backend": self.plan.backend,
            "device": self.plan.device,
            "reason": self.plan.reason,
            "rejected": {r.backend: r.reason for r in self.plan.rejected},
            "numerics": self.numerics.to_dict(),
            "width": self.width,
            "pieces": self.pieces,
            "max_rows": self.max_rows,
            "formats": list(self.formats),
            "num_experts": self.num_experts,
            "fp8_experts": list(self.fp8_experts),
            "tiles": {c.op: {**asdict(c.tile), "reason": c.reason} for c in self.tiles},
            "switches": dict(self.switches),
            "cards": list(self.cards),
        }

    def __str__(self) -> str:
        units = ", ".join(
            f"{name} {format} ({fp8} of {self.num_experts} exact on fp8 units)"
            for name, format, fp8 in zip(self.names, self.formats, self.fp8_experts, strict=True)
        )
        calls = f"{self.width} tokens in {self.pieces} piece{'s' if self.pieces != 1 else ''}"
        calls += f"; at most {self.max_rows} a piece; activations {self.numerics.activation}"
        lines = [str(self.plan), f"  {calls}"]
        lines += [f"  {choice}" for choice in self.tiles]
        lines.append(f"  {units}")
        lines += [f"  {line}" for line in self.cards]
        lines += [f"  switch {name}={value}" for name, value in self.switches]
        return "\n".join(lines)


def explain(
    plan: Plan,
    numerics: Numerics,
    limits: Limits,
    width: int,
    weights: Iterable[PackedWeight],
    tiles: tuple[TileChoice, ...] = (),
    names: tuple[str, ...] = PROJECTIONS,
) -> Explanation:
    """Put together an Explanation; `weights` are those of `names`, read one after the other."""
    read = [(w.format, w.num_experts, int(fp8_exact(w).sum())) for w in weights]
    formats, counts, exact = zip(*read, strict=True)
    max_rows = limits.rows_on(torch.device(plan.device))
    return Explanation(
        plan=plan,
        numerics=numerics,
        width=width,
        pieces=-(-width // max_rows),
        max_rows=max_rows,
        formats=formats,
        num_experts=counts[0],
        fp8_experts=exact,
        tiles=tiles,
        switches=tuple(env.changed().items()),
        names=names,
    )


def tiles_of(plan: Plan, num_slots: int, num_experts: int | None = None) -> tuple[TileChoice, ...]:
    """The tiles of the routed experts of a piece (None: of a dense MLP over `num_slots` rows)."""
    if plan.backend not in TILES:
        return ()
    name = architecture_name(torch.device(plan.device))
    if num_experts is None:
        return (choose_tile(plan.backend, name, "dense_mlp", num_slots, 1),)
    ops = ("gate_up", "down")
    return tuple(choose_tile(plan.backend, name, op, num_slots, num_experts) for op in ops)
