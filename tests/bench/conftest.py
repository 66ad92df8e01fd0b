"""A false timer, and a small problem."""

import pytest
import torch

from exactmoe.bench.problem import draw_problem, draw_selections
from exactmoe.bench.shapes import parse_shape
from exactmoe.bench.timing import Timing


class FalseReplay:
    """Runs the calls, and says that each takes `us`."""

    def __init__(self, calls, us):
        self.calls, self.us = calls, us
        self.outputs = [call() for call in calls]

    def run(self):
        self.outputs = [call() for call in self.calls]

    def time(self):
        return Timing(self.us, self.us, self.us)


class FalseTimer:
    """Every call takes as many microseconds as it is told."""

    def __init__(self, us=100.0):
        self.us, self.captured = us, 0

    def capture(self, calls):
        self.captured += 1
        return FalseReplay(list(calls), self.us)


@pytest.fixture
def timer():
    return FalseTimer()


@pytest.fixture
def rng():
    return torch.Generator().manual_seed(3)


@pytest.fixture
def shape():
    return parse_shape("256,128,8,2")


@pytest.fixture(params=["nvfp4", "mxfp4"])
def problem(request, shape, rng):
    return draw_problem(shape, request.param, torch.device("cpu"), rng)


@pytest.fixture
def selections(shape, rng):
    return draw_selections(shape, 9, 3, torch.device("cpu"), rng)
