"""The shared fixtures do what the other tests rely on."""

import pytest
import torch


@pytest.mark.parametrize("length", [1, 64, 4096, 2**20])
@pytest.mark.usefixtures("poison")
def test_poison_reaches_torch(length):
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert torch.empty(length, dtype=dtype).isnan().all()
    assert (torch.empty(length, dtype=torch.uint8) == 0xFF).all()


def test_poison_ends_with_the_test():
    assert not torch.are_deterministic_algorithms_enabled()


def test_rng_starts_equal(rng):
    drawn = torch.randint(2**31 - 1, (4,), generator=rng)
    again = torch.randint(2**31 - 1, (4,), generator=torch.Generator().manual_seed(20260))
    assert torch.equal(drawn, again)


def test_one_thread():
    assert torch.get_num_threads() == 1
