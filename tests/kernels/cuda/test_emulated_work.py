"""How blocks of the experts kernel count tiles and find an item, run by the emulator: numbers of
experts at the borders of lanes, warps and the block, where whole problems would be slow.
"""

import ctypes

import pytest
import torch

import emulate
from exactmoe.config import MAX_EXPERTS
from exactmoe.kernels.cuda.compile import pointer
from exactmoe.kernels.cuda.source import THREADS, Variant

pytestmark = pytest.mark.skipif(emulate.missing() is not None, reason=str(emulate.missing()))
TILE = 8
# Writes what it has counted, and of every tile expert, first row, rows and first eight.
FIND = """
extern "C" __global__ void find_all(const int* offsets, u32* tiles, u32* items, u32 experts) {
    __shared__ Work work;
    work.count(offsets, experts);
    for (u32 i = threadIdx.x; i <= experts; i += THREADS) tiles[i] = work.tiles_before[i];
    for (u32 tile = threadIdx.x / 32; tile < work.tiles_before[experts]; tile += THREADS / 32) {
        Item item = work.find(experts, tile, 0, threadIdx.x % 32);
        u32 values[4] = {item.expert, item.first, item.count, item.base + item.eight};
        if (threadIdx.x % 32 == 0)
            for (u32 i = 0; i < 4; ++i) items[4 * tile + i] = values[i];
    }
}
"""


def counts_of(experts: int, kind: str) -> list[int]:
    """Rows of each expert."""
    if kind == "first and last":
        return [9 * (e in (0, experts - 1)) for e in range(experts)]
    if kind == "none":
        return [0] * experts
    rng = torch.Generator().manual_seed(experts)
    return torch.randint(0, 20, (experts,), generator=rng).tolist()


@pytest.mark.parametrize("kind", ["any", "first and last", "none"])
@pytest.mark.parametrize("experts", [1, 2, 31, 32, 33, 63, 64, 65, 288, 511, 1023, MAX_EXPERTS])
def test_tiles_and_items_of_all_experts(experts, kind):
    counts = counts_of(experts, kind)
    offsets = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    tiles, items = [0], []
    for expert, (first, count) in enumerate(zip(offsets.tolist(), counts, strict=False)):
        tiles.append(tiles[-1] - (-count // TILE))
        for begin in range(0, count, TILE):
            eight = first // 8 + expert + begin // 8
            items.append([expert, first + begin, min(TILE, count - begin), eight])
    found_tiles = torch.full((experts + 1,), -1, dtype=torch.int32)
    found = torch.full((max(len(items), 1), 4), -1, dtype=torch.int32)
    emulate.run(
        Variant("mxfp4", TILE, gather=True).text() + FIND,
        "find_all",
        (1, 1, THREADS),
        0,
        [*map(pointer, (offsets, found_tiles, found)), ctypes.c_uint32(experts)],
        {"offsets": offsets},
        {"tiles": found_tiles, "items": found},
        experts,
    )
    assert found_tiles.tolist() == tiles
    assert found.tolist() == (items or [[-1] * 4])
