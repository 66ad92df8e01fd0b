"""Tests of the GPU paths. Those with the fixture `device` also run on the CPU, in small sizes, so
that their own code is tried on every machine.
"""

from collections.abc import Iterator

import pytest
import torch

from exactmoe.runtime.workspace import release_captures
from triton_device import use_triton

use_triton()  # modules here import launchers; without a card, other folders interpret them


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), "cpu"])
def device(request) -> str:
    return request.param


@pytest.fixture(autouse=True)
def no_graph_is_left() -> Iterator[None]:
    """Captures of one test do not keep the next from growing the workspace."""
    yield
    for index in range(torch.cuda.device_count()):
        release_captures(torch.device("cuda", index))
