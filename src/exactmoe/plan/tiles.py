"""Tiles of the GPU paths: how much of a matrix product one program takes. A tile never changes a
bit: all tiles of an architecture multiply by one instruction, k ascending on one accumulator.

A table lists the tiles that each path offers. The token width is chosen so that an expert's weights
are read once: the narrowest that holds the rows of an expert, mean plus two standard deviations of
uniform routing; else the widest.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from math import sqrt
from typing import TYPE_CHECKING

from exactmoe import env
from exactmoe.errors import ConfigError

if TYPE_CHECKING:
    from exactmoe.plan.dense_tiles import DenseTile

OPS = ("gate_up", "down", "dense_mlp")


@dataclass(frozen=True)
class Tile:
    """The work of one program.

    Attributes:
        tokens: N of the matrix instruction.
        rows: weight rows of a program (of each projection where there are two).
        matrix_rows: M of the tile, at least `rows` and 64; rows beyond are zeros.
        columns: k of a step.
        warps: warps of a program.
        stages: k steps in flight; 0: as many as shared memory holds.
    """

    tokens: int
    rows: int
    matrix_rows: int
    columns: int
    warps: int
    stages: int

    def __str__(self) -> str:
        stages = f", {self.stages} stages" if self.stages else ""
        return (
            f"{self.tokens} tokens x {self.rows} rows, k {self.columns}, {self.warps} warps{stages}"
        )


@dataclass(frozen=True)
class TileChoice:
    """The tile of one op in a call, and why it is not another.

    kernel: the source that computes it; "" where only the tile is asked for.
    refused: why the backend's own kernels do not; "" where they do. The reason ends with it.
    """

    op: str
    tile: "Tile | DenseTile"
    reason: str
    kernel: str = ""
    refused: str = ""

    def __str__(self) -> str:
        kernel = f"{self.kernel}, " if self.kernel else ""
        return f"{self.op}: {kernel}{self.tile} ({self.reason})"


@dataclass(frozen=True)
class TableChoice(TileChoice):
    """One of the tables below."""

    tile: Tile


# Backend -> op -> tiles by ascending tokens. kernels/cuda/experts.cu fills shared memory with its
# ring; the others are kernels/triton.
_CUDA = tuple(Tile(tokens, 128, 64, 128, 20, 0) for tokens in (8, 16, 40, 64, 128))
# In class a8, wider tiles are for kernels whose experts are all on the fp8 units.
WIDEST_ON_BF16 = 64
_CUDA_A8 = (*_CUDA[:-1], replace(_CUDA[-1], tokens=112))
# Rows of gate_up are of each projection, and both are one operand; a program of a dense down has
# twice the rows, and programs of small dense weights have fewer (ops/triton/dense_mlp.py).
_TRITON: dict[str, tuple[Tile, ...]] = {
    "gate_up": (
        Tile(16, 32, 64, 128, 4, 4),
        Tile(32, 32, 64, 128, 4, 4),
        Tile(64, 64, 128, 64, 8, 3),
        Tile(128, 64, 128, 64, 8, 3),
    ),
    "down": (
        Tile(16, 64, 64, 128, 4, 4),
        Tile(32, 64, 64, 128, 4, 4),
        Tile(64, 128, 128, 64, 8, 3),
        Tile(128, 128, 128, 64, 8, 3),
    ),
    "dense_mlp": (
        Tile(16, 32, 64, 128, 4, 4),
        Tile(32, 32, 64, 128, 4, 4),
        Tile(64, 64, 128, 64, 8, 3),
        Tile(128, 64, 128, 64, 8, 3),
    ),
}
TILES: dict[str, dict[str, tuple[Tile, ...]]] = {
    "cuda": {"gate_up": _CUDA, "down": _CUDA, "dense_mlp": _TRITON["dense_mlp"]},
    # Two accumulators: the widest takes its tokens in two batches, on the fp8 units only.
    "cuda_a8": {"gate_up": _CUDA_A8, "down": _CUDA_A8, "dense_mlp": _TRITON["dense_mlp"]},
    "triton": _TRITON,
}
# (backend, exact architecture) -> op -> tiles, where they differ from those above.
ON_ARCHITECTURE: dict[tuple[str, str], dict[str, tuple[Tile, ...]]] = {
    # 64 KiB of shared memory.
    ("triton", "gfx942"): {
        op: tuple(replace(tile, stages=2) for tile in tiles) for op, tiles in _TRITON.items()
    },
}


# Fewer programs leave multiprocessors of an H200 idle; fewer rows than half of the matrix unit's
# waste more of it than idle ones do.
_PROGRAMS, _FEWEST_ROWS = 128, 32


# Up to here the end of gate_up, which leaves multiprocessors idle, costs more than waiting for h
# inside one launch (H200: 2 tokens 3-10 % faster in one, 8 tokens 1-2 %; 16 tokens 2 % slower).
_SLOTS_OF_ONE_LAUNCH = 64


def in_one_launch(num_slots: int, way: str) -> bool:
    """Whether gate_up and down of a call run in one launch, on a path that has it; `way` is the
    setting of EXACTMOE_EXPERTS.
    """
    return num_slots <= _SLOTS_OF_ONE_LAUNCH if way == "auto" else way == "one"


def in_chains(tile: Tile, projections: int) -> Tile:
    """The tile where k is cut in chains of 128 (`a8`, fp8): a step is a chain, and at most 64 rows
    by 64 tokens leave registers for its second accumulator.
    """
    tokens = min(tile.tokens, 64)
    return Tile(
        tokens=tokens,
        rows=min(tile.rows, 64 // projections),
        matrix_rows=64,
        columns=128,
        warps=8 if tokens == 64 else 4,
        stages=min(tile.stages, 3),
    )


def expert_tile(tile: Tile, projections: int, chained: bool) -> Tile:
    """What the portable kernels make of a tile of the table for routed experts: gate and up, which
    are one operand (projections=2), or down (1).
    """
    if chained:
        tile = in_chains(tile, projections)
    return replace(tile, matrix_rows=max(tile.matrix_rows, projections * tile.rows))


def dense_tile(
    tile: Tile, projections: int, chained: bool, shape: tuple[int, int], num_tokens: int
) -> Tile:
    """What the portable kernels make of a tile of the table for a dense weight of (groups, rows):
    fewer rows where they would make too few programs; down alone has twice as many.
    """
    tile = replace(tile, rows=tile.rows * 2 // projections)
    if chained:
        tile = in_chains(tile, projections)
    (groups, size), rows, tiles = shape, tile.rows, -(-num_tokens // tile.tokens)
    while rows * projections > _FEWEST_ROWS and -(-size // rows) * tiles * groups < _PROGRAMS:
        rows //= 2
    return replace(tile, rows=rows, matrix_rows=max(64, rows * projections))


def offered(backend: str) -> tuple[int, ...]:
    """Token widths that EXACTMOE_TILE may force on a backend, in either class; an op that lacks one
    takes its next wider, else its widest.
    """
    tables = [TILES[b] for b in TILES if b.partition("_")[0] == backend.partition("_")[0]]
    widths = [{tile.tokens for tile in tiles} for table in tables for tiles in table.values()]
    return tuple(sorted(set.union(*widths)))


def checked_width(backend: str, forced: int | None) -> None:
    """ConfigError if EXACTMOE_TILE names a width that the backend does not offer."""
    if forced is not None and forced not in offered(backend):
        widths = ", ".join(map(str, offered(backend)))
        raise ConfigError(f"EXACTMOE_TILE is {forced}; allowed on backend {backend!r}: {widths}")


def tile(backend: str, architecture: str, op: str, num_slots: int, num_experts: int) -> Tile:
    """The tile of an op for a call of `num_slots` slots over `num_experts` experts (1: dense).

    Raises:
        ConfigError: EXACTMOE_TILE names a width that the backend does not offer.
    """
    return choose_tile(backend, architecture, op, num_slots, num_experts).tile


def choose_tile(
    backend: str, architecture: str, op: str, num_slots: int, num_experts: int
) -> TableChoice:
    """As `tile`, with the reason."""
    forced = env.read("EXACTMOE_TILE")
    return _choice(backend, architecture, op, num_slots, num_experts, forced)


@lru_cache(maxsize=4096)
def _choice(
    backend: str,
    architecture: str,
    op: str,
    num_slots: int,
    num_experts: int,
    forced: int | None,
) -> TableChoice:
    table = ON_ARCHITECTURE.get((backend, architecture), {}).get(op) or TILES[backend][op]
    checked_width(backend, forced)
    if forced is not None:
        return TableChoice(op, _narrowest(table, forced), f"EXACTMOE_TILE={forced}")
    mean = rows_per_expert(num_slots, num_experts)
    needed = num_slots if num_experts == 1 else mean + 2 * sqrt(mean)
    chosen = _narrowest(table, needed)
    why = "the narrowest that holds them" if chosen.tokens >= needed else "the widest"
    who = "rows" if num_experts == 1 else "rows an expert in use"
    return TableChoice(op, chosen, f"{mean:.1f} {who}; {why}")


def _narrowest(table: tuple[Tile, ...], tokens: float) -> Tile:
    """The narrowest tile that holds `tokens`, else the widest."""
    return next((tile for tile in table if tile.tokens >= tokens), table[-1])


def rows_per_expert(num_slots: int, num_experts: int) -> float:
    """Mean rows of the experts that a call uses, were its slots drawn uniformly."""
    used = num_experts * (1.0 - (1.0 - 1.0 / num_experts) ** num_slots)
    return num_slots / used if used > 0 else 0.0
