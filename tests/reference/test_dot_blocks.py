"""The order of FP8 128 x 128 blocks (contract sections 2, 4), by hand and in rational numbers."""

import numpy as np
import pytest
import torch

from chains import BIG, block_chains, by_hand
from exactmoe.reference import dot, dot_blocks
from layers import assert_same_bits, normal


def one_row(columns, terms, scales, segment=None):
    """dot_blocks of one row and one token."""
    found = dot_blocks(*by_hand(columns, terms), torch.tensor([scales]), segment or columns)
    return found.item()


def test_a_chain_ends_every_128():
    # In one chain the two ones would be lost one by one in lane 0.
    assert one_row(256, {0: BIG, 128: 1.0, 144: 1.0}, [1.0, 1.0]) == BIG + 2
    assert one_row(256, {0: BIG, 96: 1.0, 112: 1.0}, [1.0, 1.0]) == BIG
    assert dot(*by_hand(256, {0: BIG, 128: 1.0, 144: 1.0})).item() == BIG


def test_chains_ascend_and_are_multiplied_by_their_block_scale():
    terms = {0: 1.0, 128: 1.0, 256: 1.0}
    assert one_row(384, terms, [BIG, 1.0, -BIG]) == 0.0  # (BIG + 1) - BIG
    assert one_row(384, terms, [BIG, -BIG, 1.0]) == 1.0


def test_a_step_is_one_rounding():
    # 1.5 x 2^-149 is no float32: rounded alone, and then added, it would give 3 steps.
    assert one_row(256, {0: 1.0, 128: 1.5}, [2.0**-149, 2.0**-149]) == 2 * 2.0**-149


def test_a_scale_multiplies_a_chain_and_not_its_terms():
    tenth = np.float32(0.1)
    terms = np.float32(0)
    for _ in range(8):
        terms = np.float32(terms + tenth)
    product = np.float32(8 * tenth)
    assert product != terms
    found = one_row(128, dict.fromkeys(range(0, 128, 16), 1.0), [float(tenth)])
    assert found == float(product)


def test_segments_start_from_zero_and_ascend():
    ones = [1.0] * 3
    terms = {0: BIG, 128: 1.0, 256: 1.0}
    assert one_row(384, terms, ones) == BIG
    assert one_row(384, terms, ones, segment=128) == BIG
    # The second segment is 1 + 1 before it meets the first one.
    terms = {0: BIG, 256: 1.0, 384: 1.0}
    assert one_row(512, terms, [1.0] * 4, segment=256) == BIG + 2
    assert one_row(512, terms, [1.0] * 4) == BIG
    assert one_row(384, {0: BIG, 128: 1.0, 256: -BIG}, ones, segment=128) == 0.0


def test_the_last_block_and_the_last_segment_may_be_short():
    assert one_row(144, {0: 2.0, 128: 3.0, 143: 4.0}, [10.0, 100.0]) == 720.0
    assert one_row(272, {0: 2.0, 128: 3.0, 256: 4.0}, [1.0, 10.0, 100.0], segment=256) == 432.0


def test_rows_share_the_scale_of_their_128():
    w = torch.zeros(260, 16)
    w[:, 0] = 1.0
    found = dot_blocks(w, torch.ones(2, 16), torch.tensor([[2.0], [3.0], [5.0]]), 16)
    assert found.tolist() == [[2.0] * 128 + [3.0] * 128 + [5.0] * 4] * 2


def test_a_sum_that_vanishes_is_plus_zero():
    w, x = by_hand(32, {0: -(2.0**-140)})
    found = dot_blocks(w, x, torch.tensor([[2.0**-20]]), 32)
    assert found.view(torch.int32).tolist() == [[0]]


@pytest.mark.parametrize(("rows", "columns", "segment"), [(130, 144, 144), (5, 656, 256)])
def test_it_is_the_loop_in_rational_numbers(rows, columns, segment, rng):
    w, x = normal(rng, rows, columns).float(), normal(rng, 2, columns).float()
    scales = torch.rand(-(-rows // 128), -(-columns // 128), generator=rng)

    def total(row: int, token: int) -> np.float32:
        acc = np.float32(0)
        for start in range(0, columns, segment):
            part = slice(start, start + segment)
            blocks = slice(start // 128, -(-min(start + segment, columns) // 128))
            sums = block_chains(
                w[row, part].numpy(), x[token, part].numpy(), scales[row // 128, blocks].numpy()
            )
            acc = np.float32(acc + sums)
        return acc

    expected = torch.tensor([[total(r, t) for r in range(rows)] for t in range(2)])
    assert_same_bits(dot_blocks(w, x, scales, segment), expected)
