"""Gloo processes that the tests of this folder share."""

from collections.abc import Iterator

import pytest

from rank_processes import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    made = RankPool()
    yield made
    made.stop()
