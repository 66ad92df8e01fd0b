"""Kernels run on the card, or interpreted."""

from pathlib import Path

import pytest

from triton_device import mark_tests, use_triton

use_triton()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_tests(items, Path(__file__).parent)
