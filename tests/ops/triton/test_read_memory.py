"""read_segments reads every element of every segment, once."""

from functools import reduce
from operator import xor

import pytest
import torch

from exactmoe.errors import ConfigError
from exactmoe.ops.triton.read_memory import READ_TILES, read_segments
from triton_device import DEVICE

ELEMENTS = 32768


@pytest.mark.parametrize("tile", READ_TILES, ids=str)
def test_every_element_is_read(tile):
    memory = torch.randint(-(2**31), 2**31 - 1, (4 * ELEMENTS,), dtype=torch.int32)
    starts = [3 * ELEMENTS, 0]
    found = read_segments(memory.to(DEVICE), torch.tensor(starts, device=DEVICE), ELEMENTS, tile)
    pieces = [memory[s : s + ELEMENTS].view(-1, tile.elements) for s in starts]
    expected = [reduce(xor, piece) for part in pieces for piece in part.tolist()]
    assert found.tolist() == expected


def test_pieces_must_be_whole():
    memory = torch.zeros(ELEMENTS, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ConfigError, match="elements are 100; allowed: multiples of 16384"):
        read_segments(memory, torch.zeros(1, dtype=torch.int64, device=DEVICE), 100, READ_TILES[0])
