"""Tiles of the dense kernels of sm_90 (kernels/cuda/dense.cu): how much one block takes. A tile
never changes a bit.

The choice is the least estimate of a call's clock cycles, from sizes and the rates of an H200.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from exactmoe import env

_CHUNK, _SEGMENT = 64, 4096
_PROCESSORS = 132
# Bytes a clock at 1.75 GHz of all multiprocessors together: 4.4 TB/s from memory, 5.5 from L2.
_MEMORY_RATE, _L2_RATE = 2500.0, 3150.0
# Cycles of a wgmma of 16 of k: half its width, and not less than reading 64 rows takes.
_LEAST_WGMMA = 20
# Cycles until the first copies have come, and of a token in an item's epilogue, while which the
# matrix units wait.
_START_CYCLES, _TOKEN_CYCLES = 2500, 20


@dataclass(frozen=True)
class DenseTile:
    """The work of a block.

    Attributes:
        tokens: N of the matrix instruction, at most.
        rows: weight rows; in gate_up of gate and up together.
        chunks: 64 of k, in a stage.
        cluster: blocks that share their tokens.
        blocks: of a multiprocessor; with 2, down begins beside gate_up and both rings are smaller.
    """

    tokens: int
    rows: int
    chunks: int
    cluster: int
    blocks: int

    def __str__(self) -> str:
        return (
            f"{self.tokens} tokens x {self.rows} rows, k {_CHUNK * self.chunks}, "
            f"clusters of {self.cluster}"
        )


DENSE_TILES = (
    DenseTile(8, 32, 4, 1, 2),
    DenseTile(8, 32, 2, 1, 2),
    DenseTile(8, 32, 4, 1, 1),
    DenseTile(16, 32, 4, 1, 2),
    DenseTile(16, 32, 4, 2, 2),
    DenseTile(16, 32, 4, 2, 1),
    DenseTile(32, 32, 2, 2, 2),
    DenseTile(32, 32, 2, 4, 2),
    DenseTile(64, 32, 2, 4, 2),
    DenseTile(64, 64, 1, 4, 2),
    DenseTile(64, 64, 2, 4, 1),
    DenseTile(64, 128, 1, 2, 1),
    DenseTile(64, 192, 1, 1, 1),
    DenseTile(128, 64, 1, 4, 1),
    DenseTile(128, 128, 1, 2, 1),
    DenseTile(128, 128, 1, 4, 1),
    DenseTile(192, 64, 1, 4, 1),
    DenseTile(256, 64, 1, 4, 1),
    DenseTile(192, 128, 1, 2, 1),
    DenseTile(256, 128, 1, 2, 1),
)
# The two accumulators of a segmented sum leave registers for no more tokens.
WIDEST_SEGMENTED = 192


@dataclass(frozen=True)
class DenseProblem:
    """One projection, or gate and up together, of a call.

    Attributes:
        op: "gate_up" or "down".
        rows: output features.
        columns: k.
        num_tokens: of the call.
    """

    op: str
    rows: int
    columns: int
    num_tokens: int


def dense_tile(problem: DenseProblem) -> DenseTile:
    """The tile of a call; where EXACTMOE_TILE is set, of the narrowest width that holds it."""
    return _choice(problem, env.read("EXACTMOE_TILE"))


@lru_cache(maxsize=4096)
def _choice(problem: DenseProblem, forced: int | None) -> DenseTile:
    return min(_allowed(problem, forced), key=lambda tile: estimate(problem, tile))


def _allowed(problem: DenseProblem, forced: int | None) -> Iterable[DenseTile]:
    """None is wider than the narrowest that holds all tokens."""
    tiles: tuple[DenseTile, ...] = DENSE_TILES
    if problem.columns > _SEGMENT:
        tiles = tuple(tile for tile in tiles if tile.tokens <= WIDEST_SEGMENTED)
    widest = max(tile.tokens for tile in tiles)
    needed = problem.num_tokens if forced is None else forced
    width = min((tile.tokens for tile in tiles if tile.tokens >= needed), default=widest)
    if forced is None:
        return (tile for tile in tiles if tile.tokens <= width)
    return (tile for tile in tiles if tile.tokens == width)


def estimate(problem: DenseProblem, tile: DenseTile) -> float:
    """Clock cycles of a call; a last token tile less than half full comes after all others."""
    full, tail = divmod(problem.num_tokens, tile.tokens)
    if tail > tile.tokens // 2 or full == 0:
        return _START_CYCLES + _rounds(problem, tile, full + 1, tail if full == 0 else tile.tokens)
    cycles = _rounds(problem, tile, full, tile.tokens)
    return _START_CYCLES + cycles + (_rounds(problem, tile, 1, tail) if tail else 0)


def _rounds(problem: DenseProblem, tile: DenseTile, token_tiles: int, tokens: int) -> float:
    """Of token tiles of `tokens` over all weight rows."""
    pair = 2 if problem.op == "gate_up" else 1
    row_blocks = -(-problem.rows * pair // tile.rows)
    items = -(-row_blocks // tile.cluster) * token_tiles
    rounds = -(-items // (_PROCESSORS // tile.cluster))
    active = -(-items // rounds) * tile.cluster
    matrix = max(1, tile.rows // 64) * 4 * max(tokens / 2, _LEAST_WGMMA)
    copied = active * 128 * (tile.rows + tokens / tile.cluster)
    distinct = 128 * tile.rows * active / min(token_tiles, active / tile.cluster)
    step = max(matrix, copied / _L2_RATE, distinct / _MEMORY_RATE)
    return rounds * (step * problem.columns / _CHUNK + _TOKEN_CYCLES * tokens)
