"""Tiles of the Triton path: how many tokens and rows a program has. A tile never changes a bit."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """The work of one program.

    Attributes:
        tokens: N of the matrix instruction, a power of two from 16.
        rows: weight rows of a program (of each projection where there are two).
        matrix_rows: M of the tile, at least `rows` and 64; rows beyond are zeros.
        columns: k of a step.
        warps: warps of a program.
        stages: k steps in flight.
    """

    tokens: int
    rows: int
    matrix_rows: int
    columns: int
    warps: int
    stages: int


def token_tiles(num_slots: int, tokens: int, num_experts: int) -> tuple[int, bool]:
    """Programs along the tokens, an upper bound of the tiles of any routing; and whether they are
    one a slot (kernels/triton/work.py).
    """
    bound = num_slots // tokens + num_experts
    return min(num_slots, bound), num_slots <= bound
