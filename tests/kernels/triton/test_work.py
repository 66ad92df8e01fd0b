"""Every slot is in one tile, whatever the routing; the grid does not depend on it."""

import pytest
import torch

import matrix_kernels as kernels
from exactmoe.ops.triton.launch import expert_grid
from triton_device import DEVICE, jit
from triton_experts import TILE

COUNTS = {
    "one each": [1] * 9,
    "none at all": [0, 0, 0],
    "ends full": [16, 0, 16],
    "beyond a tile": [17, 0, 1, 33, 0],
    "last only": [0, 0, 0, 40],
    "first only": [40, 0, 0, 0],
    "many experts": [3, 0, 1] * 96,
    "few slots": [0, 2, 0, 3, 1] + [0] * 20,
    "few slots, two tiles": [20] + [0] * 30 + [2],
    "one expert": [100],
    "unaligned": [15, 1, 16, 31, 2, 0, 0, 47],
}


def found_tiles(counts: list[int], absent: int = 0) -> list[tuple[int, int, int]]:
    """(expert, first, end) of every program of the grid for these counts."""
    offsets = torch.tensor([0, *counts]).cumsum(0).int().to(DEVICE)
    programs, constants = expert_grid(sum(counts) + absent, len(counts), TILE)
    y = torch.full((programs, 3), -7, dtype=torch.int32, device=DEVICE)
    if programs:
        jit(kernels.tiles)[(programs,)](offsets, y, len(counts), **constants, BLOCK_N=TILE.tokens)
    return [tuple(row) for row in y.tolist()]


@pytest.mark.parametrize("absent", [0, 5, 400])
@pytest.mark.parametrize("name", COUNTS)
def test_every_slot_is_served_once(name, absent):
    counts = COUNTS[name]
    expected, first = [], 0
    for expert, count in enumerate(counts):
        expected += [(expert, first + at, first + count) for at in range(0, count, TILE.tokens)]
        first += count
    found = found_tiles(counts, absent)
    assert [tile for tile in found if tile[1] < tile[2]] == expected


@pytest.mark.parametrize(("slots", "experts", "programs"), [(8, 288, 8), (0, 8, 0), (4096, 8, 264)])
def test_few_programs_are_holes(slots, experts, programs):
    assert expert_grid(slots, experts, TILE)[0] == programs
