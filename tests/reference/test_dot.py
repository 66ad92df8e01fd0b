"""The order of every dot on the CPU (contract section 4), by hand and by an independent loop."""

import numpy as np
import pytest
import torch

from chains import BIG, by_hand, chain
from exactmoe.reference import dot, dot_dense, dot_router, dot_scaled
from layers import assert_same_bits, normal


def loops(w: torch.Tensor, x: torch.Tensor, total) -> torch.Tensor:
    return torch.tensor([[total(row, token) for row in w.numpy()] for token in x.numpy()])


@pytest.mark.parametrize("columns", [16, 32, 96, 160, 704])
def test_dot_is_the_lane_loop(columns, rng):
    w, x = torch.randn(5, columns, generator=rng), torch.randn(3, columns, generator=rng)
    assert_same_bits(dot(w, x), loops(w, x, chain))


HAND = {
    # Lanes are added +8 before +4: (BIG + 1) - BIG = 0; in order of k it would be 1.
    "tree takes the lane 8 away first": ({0: BIG, 4: -BIG, 8: 1.0}, 0.0),
    "then 4": ({0: BIG, 2: -BIG, 4: 1.0}, 0.0),
    "then 2": ({0: BIG, 1: -BIG, 2: 1.0}, 0.0),
    "neighbours last": ({0: BIG, 1: 1.0, 2: -BIG}, 1.0),
    # A lane is finished before the tree: BIG + 1 - BIG = 0 in lane 0; next to it 1 survives.
    "lane ascends": ({0: BIG, 16: 1.0, 32: -BIG}, 0.0),
    "lane ascends, small first": ({0: BIG, 16: -BIG, 32: 1.0}, 1.0),
    "lanes before the tree": ({0: BIG, 17: 1.0, 32: -BIG}, 1.0),
    "two ones of one lane are lost, of two lanes not": ({0: BIG, 1: 1.0, 9: 1.0}, BIG + 2),
    "same lane": ({0: BIG, 16: 1.0, 32: 1.0}, BIG),
}


@pytest.mark.parametrize("name", HAND)
def test_dot_order_by_hand(name):
    terms, expected = HAND[name]
    assert dot(*by_hand(48, terms)).tolist() == [[expected]]


def test_dot_rounds_the_product_and_then_the_sum():
    one = 1.0 + 2.0**-23
    w, x = torch.zeros(1, 32), torch.zeros(1, 32)
    w[0, 0], x[0, 0] = 1.0, -1.0
    w[0, 16], x[0, 16] = one, one
    # The exact square is 1 + 2^-22 + 2^-46; a fused step would keep the 2^-46.
    assert dot(w, x).tolist() == [[2.0**-22]]


def test_dot_never_gives_minus_zero():
    w, x = torch.full((1, 16), -0.0), torch.ones(2, 16)
    assert not dot(w, x).signbit().any()
    assert (
        not dot_scaled(torch.full((1, 128), -0.0), torch.ones(1, 128), torch.ones(1, 1))
        .signbit()
        .any()
    )
    assert not dot_dense(w, x).signbit().any()
    assert not dot_router(w, x).signbit().any()


def test_dot_keeps_nan_and_inf_in_their_row():
    w = torch.ones(2, 16)
    x = torch.ones(4, 16)
    x[1, 3], x[2, 5] = float("nan"), float("inf")
    found = dot(w, x)
    assert found[1].isnan().all()
    assert (found[2] == float("inf")).all()
    assert found[[0, 3]].tolist() == [[16.0, 16.0]] * 2


def test_dot_scaled_starts_a_chain_every_128():
    ones = torch.ones(1, 2)
    # In one chain the two ones would be lost one by one in lane 0.
    assert dot_scaled(*by_hand(256, {0: BIG, 128: 1.0, 144: 1.0}), ones).tolist() == [[BIG + 2]]
    assert dot(*by_hand(256, {0: BIG, 128: 1.0, 144: 1.0})).tolist() == [[BIG]]
    assert dot_scaled(*by_hand(256, {0: BIG, 112: 1.0, 16: 1.0}), ones).tolist() == [[BIG]]


def test_dot_scaled_adds_chains_ascending_times_their_scale():
    w, x = by_hand(384, {0: 1.0, 128: 1.0, 256: 1.0})
    found = dot_scaled(w, x, torch.tensor([[BIG, 1.0, -BIG]]))
    assert found.tolist() == [[0.0]]  # (BIG + 1) - BIG; another order gives 1
    found = dot_scaled(w, x, torch.tensor([[BIG, -BIG, 1.0]]))
    assert found.tolist() == [[1.0]]


def test_dot_scaled_is_one_rounding_a_step():
    # chain x scale = 1.5 x 2^-149 is no float32; one rounding with the addend 2^-149 gives 2 steps,
    # two roundings give 3.
    w, x = by_hand(256, {0: 1.0, 128: 1.5})
    found = dot_scaled(w, x, torch.tensor([[2.0**-149, 2.0**-149]]))
    assert found.tolist() == [[2 * 2.0**-149]]


@pytest.mark.parametrize("columns", [128, 256, 640])
def test_dot_scaled_is_the_chain_loop(columns, rng):
    w, x = normal(rng, 4, columns).float(), torch.randn(3, columns, generator=rng)
    scales = torch.ldexp(
        torch.ones(3, columns // 128), torch.randint(-9, 9, (3, columns // 128), generator=rng)
    )

    def total(token: int, row: int) -> np.float32:
        acc = np.float32(0)
        for group in range(columns // 128):
            part = slice(group * 128, group * 128 + 128)
            product = np.float64(chain(w[row, part].numpy(), x[token, part].numpy()))
            # A power of two moves no bit, and the sum of two float32 of this size is exact here.
            acc = np.float32(np.float64(acc) + product * np.float64(scales[token, group]))
        return acc

    expected = torch.tensor([[total(t, r) for r in range(4)] for t in range(3)])
    assert_same_bits(dot_scaled(w, x, scales), expected)


def test_dot_dense_is_one_chain_up_to_4096(rng):
    w, x = normal(rng, 3, 4096).float(), normal(rng, 2, 4096).float()
    assert_same_bits(dot_dense(w, x), dot(w, x))


@pytest.mark.parametrize("columns", [4112, 8192, 8224, 12304])
def test_dot_dense_adds_segments_of_4096_ascending(columns, rng):
    w, x = normal(rng, 3, columns).float(), normal(rng, 2, columns).float()

    def total(row: np.ndarray, token: np.ndarray) -> np.float32:
        acc = np.float32(0)
        for start in range(0, columns, 4096):
            acc = np.float32(acc + chain(row[start : start + 4096], token[start : start + 4096]))
        return acc

    assert_same_bits(dot_dense(w, x), loops(w, x, total))
    assert bool((dot_dense(w, x) != dot(w, x)).any())


def test_dot_dense_by_hand():
    assert dot_dense(*by_hand(4128, {0: BIG, 4096: 1.0, 4112: 1.0})).tolist() == [[BIG + 2]]
    assert dot_dense(*by_hand(4128, {0: BIG, 4064: 1.0, 4080: 1.0})).tolist() == [[BIG]]
    assert dot_dense(*by_hand(12304, {0: BIG, 4096: 1.0, 8192: -BIG})).tolist() == [[0.0]]


# Hidden size, length of a router segment: a sixteenth, rounded up to a multiple of 16.
ROUTER_SIZES = [(256, 16), (272, 32), (2880, 192), (96, 16), (4096, 256), (32, 16), (1600, 112)]


@pytest.mark.parametrize(("hidden", "length"), ROUTER_SIZES)
def test_dot_router_is_a_tree_over_16_segments(hidden, length, rng):
    w, x = torch.randn(3, hidden, generator=rng), normal(rng, 2, hidden).float()

    def total(row: np.ndarray, token: np.ndarray) -> np.float32:
        sums = [
            chain(row[s * length : (s + 1) * length], token[s * length : (s + 1) * length])
            for s in range(16)
        ]
        while len(sums) > 1:
            sums = [np.float32(sums[i] + sums[i + 1]) for i in range(0, len(sums), 2)]
        return sums[0]

    assert_same_bits(dot_router(w, x), loops(w, x, total))


@pytest.mark.parametrize(("hidden", "length"), ROUTER_SIZES)
def test_dot_router_by_hand(hidden, length):
    if hidden < 4 * length:
        assert dot_router(*by_hand(hidden, {0: BIG, length: 1.0})).tolist() == [[BIG]]
        return
    terms = {0: 1.0, length: BIG, 2 * length: 1.0, 3 * length: -BIG}
    assert dot_router(*by_hand(hidden, terms)).tolist() == [[1.0]]  # ascending: 0
    last = {0: BIG, length - 1: 1.0, length: 1.0, 2 * length - 1: 1.0}
    assert dot_router(*by_hand(hidden, last)).tolist() == [[BIG + 2]]  # (BIG + 1) + (1 + 1)
