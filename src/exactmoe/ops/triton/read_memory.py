"""read_segments: reads given segments of memory as fast as the card can (for benchmarks)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from exactmoe.errors import ConfigError
from exactmoe.kernels.triton import read_memory as kernels


@dataclass(frozen=True)
class ReadTile:
    """How a segment is cut: `steps` blocks of `block` int32 a program, by `num_warps` warps."""

    block: int
    steps: int
    num_warps: int

    @property
    def elements(self) -> int:
        """int32 that a program reads."""
        return self.block * self.steps


# The fastest is taken by measurement.
READ_TILES = (
    ReadTile(4096, 4, 4),
    ReadTile(8192, 2, 8),
    ReadTile(8192, 4, 8),
    ReadTile(2048, 4, 4),
)


def read_segments(memory: Tensor, starts: Tensor, elements: int, tile: ReadTile) -> Tensor:
    """Reads memory int32 [n] at segments of `elements` from each of starts int64 [S] on -> the
    exclusive or of each program's piece, int32.

    Raises:
        ConfigError: `elements` is not a multiple of what a program of the tile reads.
    """
    if elements % tile.elements:
        raise ConfigError(f"elements are {elements}; allowed: multiples of {tile.elements}")
    pieces = elements // tile.elements
    results = torch.empty(starts.numel() * pieces, dtype=torch.int32, device=memory.device)
    kernels.read_segments[(results.numel(),)](
        memory, starts, results, pieces, tile.steps, tile.block, num_warps=tile.num_warps
    )
    return results
