"""Tests of the GPU paths. Those with the fixture `device` also run on the CPU, in small sizes, so
that their own code is tried on every machine.
"""

import pytest


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), "cpu"])
def device(request) -> str:
    return request.param
