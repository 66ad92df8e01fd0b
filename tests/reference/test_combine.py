"""Combine (contract section 5): groups, order, duplicates, absent slots, one rounding."""

import itertools

import numpy as np
import pytest
import torch

from exactmoe.reference import combine
from exactmoe.reference.combine import finish
from layers import CLASSES, assert_same_bits

BIG = 2.0**24
NAN = float("nan")


def scalar(pairs: list[tuple[int, float, float]], num_experts: int, activation: str) -> float:
    """Sum of (id, weight, slot) for one element, one float32 operation at a time."""
    groups = [np.float32(0)] * 8
    bits = [int(np.float32(weight).view(np.uint32)) for _, weight, _ in pairs]
    for i in sorted(range(len(pairs)), key=lambda i: (pairs[i][0], bits[i])):
        expert, weight, slot = pairs[i]
        if not 0 <= expert < num_experts:
            continue
        term = (
            np.float32(slot)
            if activation == "a8"
            else np.float32(np.float32(weight) * np.float32(slot))
        )
        groups[8 * expert // num_experts] = np.float32(groups[8 * expert // num_experts] + term)
    while len(groups) > 1:
        groups = [np.float32(groups[i] + groups[i + 1]) for i in range(0, len(groups), 2)]
    return float(groups[0])


def run(pairs: list[tuple[int, float, float]], num_experts: int, activation: str = "a16") -> float:
    ids, weights, slots = (torch.tensor([column]) for column in zip(*pairs, strict=True))
    found = combine(slots.float()[..., None], ids.int(), weights.float(), num_experts, activation)
    assert found.shape == (1, 1)
    return float(found)


@pytest.mark.parametrize("activation", CLASSES)
@pytest.mark.parametrize("num_experts", [1, 5, 8, 9, 16, 257, 288])
def test_combine_is_the_scalar_rule(num_experts, activation, rng):
    tokens, top_k, hidden = 12, 10, 3
    ids = torch.randint(-1, num_experts + 1, (tokens, top_k), generator=rng).int()
    weights = torch.randn(tokens, top_k, generator=rng)
    slots = torch.randn(tokens, top_k, hidden, generator=rng) * 2.0 ** torch.randint(
        -20, 20, (tokens, top_k, 1), generator=rng
    )
    found = combine(slots, ids, weights, num_experts, activation)
    for t, h in itertools.product(range(tokens), range(hidden)):
        pairs = list(
            zip(ids[t].tolist(), weights[t].tolist(), slots[t, :, h].tolist(), strict=True)
        )
        assert float(found[t, h]) == scalar(pairs, num_experts, activation), (t, h)


FIRST_OF_GROUP = {
    5: [0, 1, 2, 3, 4],
    8: [0, 1, 2, 3, 4, 5, 6, 7],
    9: [0, 2, 3, 4, 5, 6, 7, 8],
    257: [0, 33, 65, 97, 129, 161, 193, 225],
    288: [0, 36, 72, 108, 144, 180, 216, 252],
}


@pytest.mark.parametrize("num_experts", FIRST_OF_GROUP)
def test_first_expert_of_each_group(num_experts):
    """BIG in one expert, twice 1 in the next: in one group BIG + 1 + 1 = BIG, in two BIG + 2."""
    for low in range(num_experts - 1):
        pairs = [(low, 1.0, BIG), (low + 1, 1.0, 1.0), (low + 1, 1.0, 1.0)]
        starts = low + 1 in FIRST_OF_GROUP[num_experts]
        assert run(pairs, num_experts) == (BIG + 2 if starts else BIG), low


A24 = [
    # Ids of (BIG, 1, -BIG, 1), E, the sum. One group: ((BIG + 1) - BIG) + 1 = 0 + 1.
    ((0, 1, 2, 3), 288, 1.0),
    ((1, 2, 0, 3), 288, 2.0),  # by ascending id: ((-BIG + BIG) + 1) + 1
    ((0, 1, 3, 2), 288, 0.0),  # ((BIG + 1) + 1) - BIG
    ((0, 1, 2, 3), 8, 1.0),  # (BIG + 1) + (-BIG + 1) = BIG - 16777215
    ((0, 2, 1, 3), 8, 2.0),  # (BIG - BIG) + (1 + 1)
    ((0, 2, 4, 6), 8, 1.0),  # ((BIG + 0) + (1 + 0)) + ((-BIG + 0) + (1 + 0))
    ((0, 4, 1, 5), 8, 2.0),  # the two BIG in the left half, the ones in the right half
]


def test_a24_value_by_the_group_tree():
    values = (BIG, 1.0, -BIG, 1.0)
    for ids, num_experts, expected in A24:
        assert run([(e, 1.0, v) for e, v in zip(ids, values, strict=True)], num_experts) == expected
    # Three in a group: (BIG + 1) + 1 = BIG, then the other group's -BIG.
    lost = [(0, 1.0, BIG), (1, 1.0, 1.0), (2, 1.0, 1.0), (40, 1.0, -BIG)]
    assert run(lost, 288) == 0.0


@pytest.mark.parametrize("activation", CLASSES)
def test_order_of_the_pairs_does_not_matter(activation):
    pairs = [(3, 1.0, BIG), (40, 1.0, 1.0), (4, 1.0, -BIG), (3, 0.5, 3.0), (200, -1.0, 7.0)]
    found = {run(list(p), 288, activation) for p in itertools.permutations(pairs)}
    assert found == {scalar(pairs, 288, activation)}


def test_equal_ids_go_by_the_bits_of_the_weight():
    # As unsigned bits: 1 < 2 < -0 < -1. As numbers -1 would come first.
    pairs = [(0, -1.0, BIG), (0, 1.0, BIG), (0, 2.0, 0.5)]
    assert run(pairs, 8) == 0.0  # (BIG + 1) - BIG; by number it would be (-BIG + BIG) + 1
    pairs = [(0, -0.0, 5.0), (0, 1.0, BIG), (0, -1.0, BIG), (0, 2.0, 0.5)]
    assert run(pairs, 8) == 0.0


def test_minus_zero_weight_sorts_behind_every_positive_weight():
    # `a8`: slots are added as they are, so the place of the -0 shows.
    assert run([(0, -0.0, 1.0), (0, 1.0, BIG), (0, 2.0, -BIG)], 8, "a8") == 1.0
    assert run([(0, 0.0, 1.0), (0, 1.0, BIG), (0, 2.0, -BIG)], 8, "a8") == 0.0


def test_weight_zero_is_a_slot_like_any_other():
    assert np.isnan(run([(0, 0.0, NAN), (1, 1.0, 2.0)], 8))
    assert np.isnan(run([(0, 0.0, float("inf"))], 8))
    assert run([(0, 0.0, 3.0), (1, 1.0, 2.0)], 8) == 2.0


def test_duplicates_add_both_weights():
    assert run([(4, 0.5, 3.0), (4, 0.25, 3.0)], 8) == 2.25
    assert run([(4, 0.5, 3.0), (4, 0.5, 3.0)], 8) == 3.0


def test_absent_slots_are_never_read():
    ids = torch.tensor([[-1, 8, 2, -(2**31)], [-1, -1, -1, 2**31 - 1]]).int()
    slots = torch.full((2, 4, 2), NAN)
    slots[0, 2] = 5.0
    found = combine(slots, ids, torch.full((2, 4), 2.0), 8, "a16")
    assert_same_bits(found, torch.tensor([[10.0, 10.0], [0.0, 0.0]]))


def test_sums_are_never_minus_zero():
    slots = torch.full((1, 2, 4), -0.0)
    found = combine(slots, torch.tensor([[0, 7]]).int(), torch.ones(1, 2), 8, "a16")
    assert_same_bits(found, torch.zeros(1, 4))


def test_finish_adds_the_shared_expert_before_the_one_rounding():
    half_step = 2.0**-8  # half a bf16 step at 1
    combined = torch.tensor([[1.0, 1.0, NAN, 0.0]])
    shared = torch.tensor([[half_step, half_step + 2.0**-23, 1.0, -0.0]])
    found = finish(combined, shared, "bf16")
    assert found.dtype == torch.bfloat16
    assert found.view(torch.int16).tolist() == [[0x3F80, 0x3F81, 0x7FC0, 0]]
    found = finish(combined, shared, "f32")
    assert found[0, :2].tolist() == [1 + half_step, 1 + half_step + 2.0**-23]
    assert found.view(torch.int32)[0, 2] == 0x7FC00000
    assert_same_bits(finish(combined, None, "f32")[:, :2], combined[:, :2])


def test_no_tokens():
    found = combine(torch.zeros(0, 4, 6), torch.zeros(0, 4).int(), torch.zeros(0, 4), 8, "a16")
    assert found.shape == (0, 6) and found.dtype == torch.float32
