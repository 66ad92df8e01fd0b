"""route_table on the card's path: the reference's offsets, order and fault, in one launch."""

import pytest
import torch
from torch import Tensor

from exactmoe import ops
from exactmoe.ops.triton.route_table import route_table
from exactmoe.runtime.routes import RouteTable
from layers import assert_same_bits
from triton_device import DEVICE

FILL = -7


def build(ids: Tensor, experts: int) -> RouteTable:
    routes = RouteTable(
        torch.full((experts + 1,), FILL, dtype=torch.int32, device=DEVICE),
        torch.full((ids.numel(),), FILL, dtype=torch.int32, device=DEVICE),
        torch.zeros(1, dtype=torch.int64, device=DEVICE),
    )
    route_table(ids.to(DEVICE), experts, routes)
    return routes


def compare(ids: Tensor, experts: int) -> None:
    found = build(ids, experts)
    expected = RouteTable(
        torch.empty(experts + 1, dtype=torch.int64),
        torch.empty(ids.numel(), dtype=torch.int64),
        torch.zeros(1, dtype=torch.int64),
    )
    ops.path("reference").route_table(ids, experts, expected)
    assert_same_bits(found.offsets.cpu(), expected.offsets.int())
    assert_same_bits(found.fault.cpu(), expected.fault)
    present = int(expected.offsets[-1])
    assert_same_bits(found.slots[:present].cpu(), expected.slots[:present].int())
    assert bool((found.slots[present:] == FILL).all()), "entries beyond offsets[E] were written"


@pytest.mark.parametrize("experts", [1, 3, 4, 7, 30])
@pytest.mark.parametrize(("width", "top_k"), [(0, 8), (1, 1), (17, 6), (171, 3)])
def test_same_table_as_the_reference(experts, width, top_k, rng):
    compare(torch.randint(-2, experts + 2, (width, top_k), generator=rng).int(), experts)


@pytest.mark.parametrize(("experts", "width"), [(5, 1537), (3, 8192), (1024, 9)])
def test_wide_calls_and_many_experts(experts, width, rng):
    compare(torch.randint(-1, experts, (width, 8), generator=rng).int(), experts)


@pytest.mark.parametrize("expert", [2, 5])
def test_every_slot_at_one_expert(expert):
    """Its count passes the 16 bits that an expert has in a block's running sum."""
    compare(torch.full((8192, 9), expert, dtype=torch.int32), 6)


def test_a_fault_stays_and_only_an_id_beyond_the_last_expert_sets_it():
    big, small = 2**31 - 1, -(2**31)
    routes = build(torch.tensor([[3, 4], [big, small]], dtype=torch.int32), 4)
    assert routes.offsets.tolist() == [0, 0, 0, 0, 1]
    assert routes.fault.tolist() == [1]
    route_table(torch.tensor([[0, 1], [2, 3]], dtype=torch.int32, device=DEVICE), 4, routes)
    assert routes.fault.tolist() == [1]
    assert build(torch.tensor([[3, small]], dtype=torch.int32), 4).fault.tolist() == [0]
    assert build(torch.tensor([[3, 4]], dtype=torch.int32), 4).fault.tolist() == [1]
