"""Fixtures and rules that every test shares."""

import os
from collections.abc import Callable, Iterator

# Before torch and numba start their thread pools: two pytest workers share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

torch.set_num_threads(1)

SEED = 20260


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips the tests whose marker asks for more CUDA cards than there are."""
    cards = torch.cuda.device_count()
    for item in items:
        needed = 2 if item.get_closest_marker("two_gpu") else bool(item.get_closest_marker("gpu"))
        if needed > cards:
            reason = f"needs {int(needed)} CUDA cards, this machine has {cards}"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def rng() -> torch.Generator:
    """A CPU generator with a fixed seed, fresh for each test."""
    return torch.Generator().manual_seed(SEED)


@pytest.fixture
def poison() -> Iterator[Callable[[torch.device | str], None]]:
    """Makes memory that nobody wrote read as NaN for the length of a test.

    torch.empty and its kin then return NaN (the largest value for integers): PyTorch's own
    fill_uninitialized_memory, which deterministic mode turns on. For memory that other libraries
    take (numpy, numba), call poison("cpu") just before: it writes 0xFF over blocks of many sizes
    and gives them back, which the next blocks of 4 to 80 KB are seen to reuse. 0xFF bytes are NaN
    in f64, f32, f16, bf16 and e4m3, and -1 as a signed integer.
    """
    guards = []

    def fill(device: torch.device | str = "cpu") -> None:
        blocks = [
            torch.full((2**bits,), 0xFF, dtype=torch.uint8, device=device)
            for bits in range(6, 25)
            for _ in range(4)
        ]
        # A live block above the freed ones keeps the C allocator from giving them to the system.
        guards.append(torch.zeros(64, device=device))
        del blocks

    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield fill
    torch.use_deterministic_algorithms(before, warn_only=warn_only)
