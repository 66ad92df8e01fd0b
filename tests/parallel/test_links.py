"""The way between two cards is tried with bytes of real payloads, and refused if one differs."""

import pytest
import torch

from exactmoe.errors import Unsupported
from exactmoe.parallel import links
from exactmoe.parallel.links import Link, Rate, copied, try_copies

CPU = torch.device("cpu")
SIZES = (16 << 10, 1 << 20)


def test_rates_of_every_size():
    rates = try_copies(CPU, CPU, copied, "copies", SIZES)
    assert [rate.nbytes for rate in rates] == list(SIZES)
    assert all(rate.bytes_per_second > 0 for rate in rates)
    assert links.SIZES == (16384, 65536, 524288, 1048576, 67108864)


@pytest.mark.parametrize("place", [0, 4095, (1 << 20) - 1])
def test_one_byte_that_differs(place):
    def wrong(source, target):
        target.copy_(source)
        if len(source) > place:
            target[place] ^= 0x10

    with pytest.raises(Unsupported, match=rf"copies A: of \d+ bytes, byte {place} is 0x.. and was"):
        try_copies(CPU, CPU, wrong, "copies A", SIZES)


def test_a_copy_that_does_nothing_or_comes_twice_from_one_place():
    with pytest.raises(Unsupported, match="byte 0 is 0x"):
        try_copies(CPU, CPU, lambda source, target: None, "copies", SIZES)

    def half(source, target):
        target[: len(target) // 2].copy_(source[: len(source) // 2])
        target[len(target) // 2 :].copy_(source[: len(source) // 2])

    with pytest.raises(Unsupported, match=f"byte {SIZES[0] // 2}"):
        try_copies(CPU, CPU, half, "copies", SIZES)


def test_the_pattern_has_no_period():
    for nbytes in SIZES:
        bytes_ = links._pattern(nbytes)
        assert bytes_.dtype == torch.uint8 and len(bytes_) == nbytes
        step = 4096
        while step < nbytes:
            assert not torch.equal(bytes_[step:], bytes_[:-step])
            step *= 2


def test_text():
    way = Link(CPU, CPU, True, (Rate(16 << 10, 2.5e9), Rate(64 << 20, 3.0e11)))
    assert str(way) == "cpu to cpu: direct, GB/s at 16 KiB 2.5, 64 MiB 300"
