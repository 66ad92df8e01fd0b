"""route_table: stable, absent ids in no expert, and the fault word."""

import pytest
import torch

from exactmoe import ops
from exactmoe.runtime.routes import RouteTable
from layers import assert_same_bits


def table(num_experts: int, num_slots: int) -> RouteTable:
    return RouteTable(
        torch.full((num_experts + 1,), -7),
        torch.full((num_slots,), -7),
        torch.zeros(1, dtype=torch.int64),
    )


def build(path: str, ids: torch.Tensor, num_experts: int) -> RouteTable:
    routes = table(num_experts, ids.numel())
    ops.path(path).route_table(ids, num_experts, routes)
    return routes


def test_by_hand():
    ids = torch.tensor([[2, 0], [-1, 2], [0, 2], [1, -5]], dtype=torch.int32)
    routes = build("cpu", ids, 4)
    assert routes.offsets.tolist() == [0, 2, 3, 6, 6]
    assert routes.slots[:6].tolist() == [1, 4, 6, 0, 3, 5]
    assert routes.fault.tolist() == [0]


def test_ids_beyond_the_last_expert_are_absent_and_set_the_fault():
    big = 2**31 - 1
    routes = build("cpu", torch.tensor([[3, 4], [big, 0]], dtype=torch.int32), 4)
    assert routes.offsets.tolist() == [0, 1, 1, 1, 2]
    assert routes.slots[:2].tolist() == [3, 0]
    assert routes.fault.tolist() == [1]
    # A later call without such an id does not hide it.
    ops.path("cpu").route_table(torch.tensor([[0, 1]], dtype=torch.int32), 4, routes)
    assert routes.fault.tolist() == [1]


@pytest.mark.parametrize("experts", [1, 3, 256, 1024])
@pytest.mark.parametrize("width", [0, 1, 17, 300])
def test_same_table_as_the_reference(experts, width, rng):
    ids = torch.randint(-2, experts + 2, (width, 5), generator=rng).int()
    found, expected = build("cpu", ids, experts), build("reference", ids, experts)
    assert_same_bits(found.offsets, expected.offsets)
    assert_same_bits(found.fault, expected.fault)
    present = int(found.offsets[-1])
    assert_same_bits(found.slots[:present], expected.slots[:present])
