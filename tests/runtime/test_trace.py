"""RouteRing: order, wrap-around, what was lost, and memory that never moves."""

import pytest
import torch

from exactmoe.errors import ConfigError
from exactmoe.runtime.trace import RouteRing

CPU = torch.device("cpu")


def ids(*rows):
    return torch.tensor(rows, dtype=torch.int32).reshape(len(rows), -1)


def test_steps_and_tokens_in_order():
    ring = RouteRing(CPU, 2, 10)
    ring.record(ids((3, 1), (0, 2)))
    ring.record(ids((-1, 5)))
    found = ring.read()
    assert found.expert_ids.tolist() == [[3, 1], [0, 2], [-1, 5]]
    assert found.steps.tolist() == [0, 0, 1]
    assert found.tokens.tolist() == [0, 1, 0]
    assert found.lost == 0
    assert found.expert_ids.dtype == torch.int32


def test_the_oldest_tokens_are_lost():
    ring = RouteRing(CPU, 1, 3)
    for step in range(5):
        ring.record(ids((10 * step,), (10 * step + 1,)))
    found = ring.read()
    assert found.expert_ids.flatten().tolist() == [31, 40, 41]
    assert found.steps.tolist() == [3, 4, 4]
    assert found.tokens.tolist() == [1, 0, 1]
    assert found.lost == 7


def test_a_step_wider_than_the_ring_keeps_its_end():
    ring = RouteRing(CPU, 1, 3)
    ring.record(ids((9,)))
    ring.record(ids(*((row,) for row in range(8))))
    found = ring.read()
    assert found.expert_ids.flatten().tolist() == [5, 6, 7]
    assert found.tokens.tolist() == [5, 6, 7]
    assert found.steps.tolist() == [1, 1, 1]
    assert found.lost == 6


def test_nothing_recorded_and_an_empty_step():
    ring = RouteRing(CPU, 2, 4)
    assert ring.read().expert_ids.shape == (0, 2)
    ring.record(torch.empty((0, 2), dtype=torch.int32))
    ring.record(ids((1, 2)))
    found = ring.read()
    assert found.steps.tolist() == [1]
    assert found.lost == 0


def test_memory_stays_where_it_is():
    """What a captured graph writes to."""
    ring = RouteRing(CPU, 2, 4)
    before = [t.data_ptr() for t in vars(ring).values() if isinstance(t, torch.Tensor)]
    assert len(before) == 4
    for _ in range(3):
        ring.record(ids((1, 2), (3, 4), (5, 6)))
    ring.read()
    assert before == [t.data_ptr() for t in vars(ring).values() if isinstance(t, torch.Tensor)]


def test_it_records_in_and_after_inference_mode():
    with torch.inference_mode():
        ring = RouteRing(CPU, 1, 4)
        ring.record(ids((1,)))
    ring.record(ids((2,)))
    assert ring.read().expert_ids.flatten().tolist() == [1, 2]


def test_a_capacity_below_one():
    with pytest.raises(ConfigError, match="capacity is 0; allowed: tokens from 1"):
        RouteRing(CPU, 1, 0)
