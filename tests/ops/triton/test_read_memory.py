"""read_segments reads every element of every segment, once."""

from functools import reduce
from operator import xor

import pytest
import torch

from exactmoe.bench.ceilings import CardReader
from exactmoe.bench.timing import ClockTimer
from exactmoe.errors import ConfigError
from exactmoe.ops.triton import read_memory
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


def test_card_reader(monkeypatch):
    read = []

    def false_read(memory, starts, elements, tile):
        assert elements % tile.elements == 0 and int(starts.max()) + elements <= memory.numel()
        read.append((sorted(starts.tolist()), elements))
        return starts.int()

    monkeypatch.setattr(read_memory, "read_segments", false_read)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**22, 2**22))
    reader = CardReader(torch.device("cpu"), 4, 1.5 * 4 * ELEMENTS, ClockTimer(0.0))
    # All of it for the rate; then segments of whole granules, scaled to the expert's own size.
    assert {elements for _, elements in read} == {2**21 // 4}
    assert reader.bytes_per_us > 0 and reader._ratio == 1.5
    read.clear()
    assert reader.segments_us(3) > 0
    assert all(len(set(starts)) == 3 and elements == ELEMENTS for starts, elements in read)
    assert len({tuple(starts) for starts, _ in read}) > 1
