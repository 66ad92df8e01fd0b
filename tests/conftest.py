"""Fixtures and rules that every test shares."""

import os
import signal
from collections.abc import Iterator

# Before torch and numba start their thread pools: two pytest workers share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

torch.set_num_threads(1)

# A shell's background job, and every process that it starts, ignores ctrl-C.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

SEED = 20260


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips the tests whose marker asks for more CUDA cards than there are.

    Slow tests come first: none begins when the other worker has nothing left. Those of the pool of
    ranks do too, so that one worker has them all and starts one pool.
    """
    cards = torch.cuda.device_count()
    items.sort(key=lambda item: not _is_early(item))
    for item in items:
        needed = 2 if item.get_closest_marker("two_gpu") else bool(item.get_closest_marker("gpu"))
        if needed > cards:
            reason = f"needs {int(needed)} CUDA cards, this machine has {cards}"
            item.add_marker(pytest.mark.skip(reason=reason))


def _is_early(item: pytest.Item) -> bool:
    return bool(item.get_closest_marker("slow")) or "pool" in getattr(item, "fixturenames", ())


@pytest.fixture
def rng() -> torch.Generator:
    """A CPU generator with a fixed seed, fresh for each test."""
    return torch.Generator().manual_seed(SEED)


@pytest.fixture
def poison() -> Iterator[None]:
    """Makes torch memory that nobody wrote read as NaN, on every device, while the test runs.

    torch.empty and its kin return NaN, and the largest value for integers: PyTorch's own
    fill_uninitialized_memory, which deterministic mode turns on. Giving NaN blocks back to the
    allocator instead was tried: on the CPU the next block is often another one.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before, warn_only=warn_only)
