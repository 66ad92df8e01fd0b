"""What `layer.explain()` says: the path, the numerics, the pieces, and the matrix units of each
projection.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from exactmoe import env
from exactmoe.config import Limits, Numerics
from exactmoe.formats import PackedWeight, fp8_exact
from exactmoe.plan.architectures import architecture_name
from exactmoe.plan.choose import Plan, WeightShape, dense_obstacle
from exactmoe.plan.dense_tiles import DenseProblem, choose_dense_tile
from exactmoe.plan.tiles import (
    TILES,
    WIDEST_ON_BF16,
    TableChoice,
    Tile,
    TileChoice,
    choose_tile,
    dense_tile,
    expert_tile,
    in_one_launch,
)

PROJECTIONS = ("gate", "up", "down")


_CUDA_KERNELS, _TRITON_KERNELS = "kernels/cuda/experts.cu", "kernels/triton/"
_CUDA_DENSE = "kernels/cuda/dense.cu"
_WITHOUT_TILES = {
    "cpu": "compiled loops of kernels/cpu",
    "reference": "plain loops of exactmoe.reference",
}


@dataclass(frozen=True)
class Explanation:
    """Which path runs a call of `width` tokens, and why.

    Attributes:
        max_rows: tokens that a piece may have.
        fp8_experts: of gate, up and down, how many experts the fp8 matrix units hold without losing
            a bit.
        tiles: of the ops of a piece; a CPU's are fixed and not named.
        switches: of the environment that are not at their default, as they are written there.
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
            "tiles": {
                c.op: {**asdict(c.tile), "reason": c.reason, "kernel": c.kernel} for c in self.tiles
            },
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
        switches=tuple((name, env.plain(value)) for name, value in env.changed().items()),
        names=names,
    )


def tiles_of(
    plan: Plan,
    numerics: Numerics,
    weights: Sequence[WeightShape],
    num_slots: int,
    counts: Sequence[int],
) -> tuple[TileChoice, ...]:
    """The tiles that run the routed experts of a piece; none on a CPU, whose loops have none.

    weights: gate, up and down. counts: experts of each card; cards of equal tiles are told once.
    """
    if plan.backend not in TILES:
        return ()
    of_cards = [_expert_tiles(plan, numerics, weights, num_slots, count) for count in counts]
    if len({tuple(choice.tile for choice in tiles) for tiles in of_cards}) == 1:
        return of_cards[0]
    return tuple(
        replace(choice, op=f"{choice.op} of card {card}")
        for card, tiles in enumerate(of_cards)
        for choice in tiles
    )


def _expert_tiles(
    plan: Plan, numerics: Numerics, weights: Sequence[WeightShape], num_slots: int, count: int
) -> tuple[TileChoice, ...]:
    name = architecture_name(torch.device(plan.device))
    found: list[TileChoice] = []
    for op, weight, projections in (("gate_up", weights[0], 2), ("down", weights[2], 1)):
        choice = choose_tile(plan.tiles, name, op, num_slots, count)
        if plan.backend == "cuda":
            one = in_one_launch(num_slots, env.read("EXACTMOE_EXPERTS"))
            launch = "in the launch of gate_up" if one else "in a launch of its own"
            if op == "down":
                choice = replace(choice, reason=f"{choice.reason}; {launch}")
            found.append(_on_units(replace(choice, kernel=_CUDA_KERNELS), plan, count))
            continue
        chained = numerics.activation == "a8" or weight.format == "fp8"
        tile = expert_tile(choice.tile, projections, chained)
        found.append(_changed(choice, tile, chained, f"{_TRITON_KERNELS}{op}.py"))
    return tuple(found)


def mlp_tiles_of(
    plan: Plan, weights: Sequence[WeightShape], num_tokens: int
) -> tuple[TileChoice, ...]:
    """The tiles that run a piece of a dense MLP or shared expert, and where the backend has kernels
    of its own for them that do not take these, why.

    weights: gate, up and down; or gate and up where another kernel reads h.
    """
    ops = {"gate_up": weights[0]} | ({"down": weights[2]} if len(weights) > 2 else {})
    if plan.backend != "cuda":
        return dense_tiles_of(plan, ops, num_tokens)
    obstacle = dense_obstacle(weights)
    if obstacle is not None:
        portable = dense_tiles_of(plan, ops, num_tokens)
        said = f"{_CUDA_DENSE}: {obstacle}"
        return tuple(
            replace(choice, reason=f"{choice.reason}; not {said}", refused=said)
            for choice in portable
        )
    found = []
    for op, weight in ops.items():
        choice = choose_dense_tile(DenseProblem(op, weight.rows, weight.columns, num_tokens))
        found.append(replace(choice, op=f"dense {op}", kernel=_CUDA_DENSE))
    return tuple(found)


def _on_units(choice: TileChoice, plan: Plan, count: int) -> TileChoice:
    """The widest tiles of class a8 are for experts on the fp8 units."""
    if not plan.units or choice.tile.tokens <= WIDEST_ON_BF16:
        return choice
    if plan.units == "bf16":
        tile = replace(choice.tile, tokens=WIDEST_ON_BF16)
        return replace(choice, tile=tile, reason=f"{choice.reason} on the bf16 units")
    told = f"{choice.reason}; {WIDEST_ON_BF16} tokens where one of the {count} experts is on the "
    return replace(choice, reason=f"{told}bf16 units")


def dense_tiles_of(
    plan: Plan, weights: Mapping[str, WeightShape], num_tokens: int, groups: int = 1
) -> tuple[TileChoice, ...]:
    """The tiles of the portable kernels that run the dense weights of a piece, by the name of the
    launch: "gate_up" is two projections of these sizes as one, any other is one.
    """
    if plan.backend not in TILES:
        return ()
    name = architecture_name(torch.device(plan.device))
    found = []
    for op, weight in weights.items():
        choice = choose_tile(plan.backend, name, "dense_mlp", num_tokens, 1)
        projections, chained = 2 if op == "gate_up" else 1, weight.format == "fp8"
        shape = (groups, weight.rows)
        tile = dense_tile(choice.tile, projections, chained, shape, num_tokens)
        choice = replace(choice, op=f"dense {op}")
        kernel = "dense_mlp.py" if op in ("gate_up", "down") else "dense_linear.py"
        found.append(_changed(choice, tile, chained, f"{_TRITON_KERNELS}{kernel}"))
    return tuple(found)


def _changed(choice: TableChoice, tile: Tile, chained: bool, kernel: str) -> TileChoice:
    """The tile that a kernel takes for one of the table, and why it is another."""
    reason = choice.reason
    if chained and tile.tokens != choice.tile.tokens:
        reason += f"; cut from {choice.tile.tokens} tokens: chains of 128 have two accumulators"
    elif chained:
        reason += "; in chains of 128"
    return TileChoice(choice.op, tile, reason, kernel)


def first_line(
    plan: Plan, numerics: Numerics, formats: Sequence[str], tiles: Sequence[TileChoice]
) -> str:
    """What the log says when a path and tile first run: kernels, tiles, numerics, why no other.

    Of the tiles' reasons, which name the width, only what refuses a kernel: a line comes once a
    tile.
    """
    values = ", ".join(f"{name} {value}" for name, value in numerics.to_dict().items())
    told = [f"{choice.op}: {choice.kernel}, {choice.tile}" for choice in tiles]
    kernels = "; ".join(told) or _WITHOUT_TILES.get(plan.backend, plan.backend)
    parts = [
        f"backend {plan.backend} on {plan.device} runs {', '.join(formats)}: {kernels}",
        f"numerics: {values}",
        f"because: {plan.reason}",
        *dict.fromkeys(f"not {choice.refused}" for choice in tiles if choice.refused),
        *(f"not {r.backend}: {r.reason}" for r in plan.rejected),
    ]
    return " | ".join(parts)
