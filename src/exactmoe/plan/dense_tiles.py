"""Tiles of the dense kernels of sm_90 (kernels/cuda/dense.cu): how much one block takes. A tile
never changes a bit.

The choice is the least estimate of a call's clock cycles. What a tile costs is measured: one H200,
2026-11-30, H 4096 with I 2048 and 12288 at 1 to 4096 tokens (docs/log.md).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from exactmoe import env
from exactmoe.plan.tiles import TileChoice, checked_width

CHUNK = 64  # of k
_SEGMENT = 4096
_PROCESSORS = 132
# Clusters of four that 132 multiprocessors hold: those of some groups do not divide by four.
_CLUSTERS_OF_FOUR = 32
# Bytes of weights a clock at 1.75 GHz from memory, of all multiprocessors together.
_MEMORY_RATE = 2350.0
# Of N of the matrix instruction.
_WIDTH_STEP = 16
# Cycles of a launch, and of a token in an item's epilogue, while which the matrix units wait.
_START_CYCLES, _TOKEN_CYCLES = 4450, 18


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
            f"{self.tokens} tokens x {self.rows} rows, k {CHUNK * self.chunks}, "
            f"clusters of {self.cluster}"
        )


# By tokens: cycles of a block for 64 of k while all multiprocessors work, in gate_up and in down.
# Blocks of 128 rows in pairs do the same whatever their tile's most tokens are.
_PAIRS = {64: (501, 478), 128: (679, 661), 192: (985, 985), 256: (1268, 1278)}
_CYCLES: dict[DenseTile, dict[int, tuple[int, int]]] = {
    DenseTile(8, 32, 2, 1, 2): {8: (228, 237)},
    DenseTile(16, 32, 4, 1, 2): {16: (265, 239)},
    DenseTile(16, 32, 4, 2, 1): {16: (226, 275)},
    DenseTile(64, 64, 2, 4, 1): {64: (303, 296)},
    DenseTile(64, 128, 1, 2, 1): _PAIRS,
    DenseTile(64, 192, 1, 1, 1): {64: (677, 690)},
    DenseTile(128, 128, 1, 2, 1): _PAIRS,
    DenseTile(256, 128, 1, 2, 1): _PAIRS,
}
DENSE_TILES = tuple(_CYCLES)
# The two accumulators of a segmented sum leave registers for no more tokens.
WIDEST_SEGMENTED = 128


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
    """The tile of a call; where EXACTMOE_TILE is set, of the narrowest width that holds it.

    Raises:
        ConfigError: EXACTMOE_TILE names a width that the backend does not offer.
    """
    return _choice(problem, env.read("EXACTMOE_TILE"))


def choose_dense_tile(problem: DenseProblem) -> TileChoice:
    """As `dense_tile`, with the reason."""
    forced = env.read("EXACTMOE_TILE")
    reason = f"{problem.num_tokens} rows; the least time by the measured cycles of each tile"
    if forced is not None:
        reason = f"EXACTMOE_TILE={forced}"
    return TileChoice(problem.op, _choice(problem, forced), reason)


@lru_cache(maxsize=4096)
def _choice(problem: DenseProblem, forced: int | None) -> DenseTile:
    checked_width("cuda", forced)
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


def best_span(problem: DenseProblem, tile: DenseTile) -> int:
    """Tokens of a block: all that the tile has, or as many as make its token tiles equal, of which
    there may be more than the fewest where multiprocessors have room.
    """
    return _span(problem, tile)[1]


def estimate(problem: DenseProblem, tile: DenseTile) -> float:
    """Clock cycles of a call."""
    return _span(problem, tile)[0]


@lru_cache(maxsize=4096)
def _span(problem: DenseProblem, tile: DenseTile) -> tuple[float, int]:
    fewest = -(-problem.num_tokens // tile.tokens)
    equal = (-(-problem.num_tokens // count) for count in range(fewest, 2 * fewest + 1))
    spans = {min(-(-span // _WIDTH_STEP) * _WIDTH_STEP, tile.tokens) for span in equal}
    spans.add(tile.tokens)
    return min((_cycles(problem, tile, span), span) for span in spans)


def _cycles(problem: DenseProblem, tile: DenseTile, span: int) -> float:
    """Each block takes its items one after the other; a last token tile that is at most half full
    comes after all others (kernels/cuda/dense.cuh).
    """
    pair = 2 if problem.op == "gate_up" else 1
    clusters = -(-problem.rows * pair // (tile.rows * tile.cluster))
    most = _CLUSTERS_OF_FOUR if tile.cluster == 4 else _PROCESSORS // tile.cluster
    token_tiles, tail = divmod(problem.num_tokens, span)
    last = 0 < 2 * tail <= span and token_tiles > 0
    token_tiles += tail > 0 and not last
    rounds = -(-clusters * token_tiles // most)
    cycles = rounds * _item(
        problem, tile, min(span, problem.num_tokens), token_tiles, clusters * token_tiles / rounds
    )
    behind = clusters * (token_tiles + last) - rounds * most
    if behind > 0:
        cycles += -(-behind // most) * _item(problem, tile, tail, 1, min(behind, most))
    return _START_CYCLES + cycles


def _item(
    problem: DenseProblem, tile: DenseTile, tokens: int, token_tiles: int, clusters: float
) -> float:
    """Of `tokens` x all of k, while `clusters` work that share the weights of `token_tiles`."""
    fetched = 2 * CHUNK * tile.rows * clusters * tile.cluster / min(token_tiles, clusters)
    step = max(_step(_CYCLES[tile], problem.op == "down", tokens), fetched / _MEMORY_RATE)
    return step * problem.columns / CHUNK + _TOKEN_CYCLES * tokens


def _step(measured: dict[int, tuple[int, int]], op: int, tokens: int) -> float:
    """Between the measured widths on a line, and below them as at the least."""
    if tokens <= min(measured):
        return measured[min(measured)][op]
    above = min(width for width in measured if width >= tokens)
    below = max(width for width in measured if width < tokens)
    share = (tokens - below) / (above - below)
    return measured[below][op] * (1 - share) + measured[above][op] * share
