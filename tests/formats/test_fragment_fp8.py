"""Fragment order of the fp8 units: the values that the kernel's tables give, and the way back."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exactmoe.formats import PackedWeight, dequantize, fp8_exact, fragment
from exactmoe.formats.packed import BLOCK

POWERS = [1, 2, 4, *(field << 3 for field in range(1, 16))]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def random_weight(format: str, seed: int, experts: int = 2, rows: int = 128, k: int = 256):
    """Exact on the fp8 units: 15 binades a piece, blocks of zeros with any scale."""
    draw = torch.Generator().manual_seed(seed)
    block = BLOCK[format]
    codes = torch.randint(0, 256, (experts, rows, k // 2), dtype=torch.uint8, generator=draw)
    zeros = torch.rand(experts, rows, k // block, generator=draw) < 0.3
    parts = codes.unflatten(-1, (-1, block // 2))
    parts[zeros] &= 0x88  # both signs of zero
    shape = (experts, rows, k // block)
    if format == "mxfp4":
        piece = torch.randint(100, 130, (experts, rows, k // 128, 1), generator=draw)
        inside = torch.randint(0, 15, (experts, rows, k // 128, 4), generator=draw)
        scales = (piece + inside).flatten(-2).to(torch.uint8)
        scales[zeros] = torch.randint(0, 255, shape, dtype=torch.uint8, generator=draw)[zeros]
        return PackedWeight(format, parts.flatten(-2), scales)
    scales = torch.tensor(POWERS, dtype=torch.uint8)[torch.randint(3, 18, shape, generator=draw)]
    scales[zeros] = torch.randint(0, 127, shape, dtype=torch.uint8, generator=draw)[zeros]
    return PackedWeight(format, parts.flatten(-2), scales, torch.ones(experts))


def copied(weight: PackedWeight) -> PackedWeight:
    return PackedWeight(
        weight.format, weight.codes.clone(), weight.scales.clone(), weight.global_scale
    )


def values_of(weight: PackedWeight, p: np.ndarray) -> np.ndarray:
    """What kernels/cuda/unpack_fp8.cuh makes of the bytes, number by number: [E, N, K]."""
    experts, rows, k = weight.num_experts, weight.rows, weight.columns
    width = 128 // BLOCK[weight.format]
    words = weight.codes.contiguous().view(torch.int32).numpy().view(np.uint32)
    words = words.reshape(experts, rows // 128, k // 128, 16, 8, 4, 4)
    scales = weight.scales.numpy().reshape(experts, rows // 128, k // 128, 128, width)
    values = np.zeros((experts, rows, k))
    for e, panel, chunk, group, row, c, j in np.ndindex(*words.shape):
        word = int(words[e, panel, chunk, group, row, c, j])
        piece = scales[e, panel, chunk, group * 8 + row].astype(int)
        exponent = sum((int(piece[b]) & 3) << (2 * b) for b in range(4)) - 127 - 6 - p[e]
        for half in (0, 1):
            block = (j * 2 + half) * 16 // BLOCK[weight.format]
            step = (piece[block] >> 3) & 15
            for i in range(4):
                magnitude = E2M1[word >> (16 * half + 4 * i) & 7]
                table = 0.0 if step == 15 else magnitude * 2.0 ** (step - 8)
                negative = word >> (8 * i + (3 if half else 7)) & 1
                at = chunk * 128 + j * 32 + half * 16 + 4 * c + i
                value = (-table if negative else table) * 2.0**exponent
                values[e, panel * 128 + group * 8 + row, at] = value
    return values


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
def test_values(format):
    weight = random_weight(format, 0)
    expected = dequantize(weight).double().numpy()
    assert fp8_exact(weight).all()
    fragment.to_fragment(weight, torch.ones(2, dtype=torch.bool))
    p = np.zeros(2)
    if format == "mxfp4":
        p = fragment.largest_exponents(weight, torch.ones(2, dtype=torch.bool)).numpy()
    found = values_of(weight, p) * 2.0 ** p[:, None, None]
    np.testing.assert_array_equal(found, expected)


@settings(deadline=None, max_examples=25)
@given(st.sampled_from(["mxfp4", "nvfp4"]), st.integers(0, 10**6))
def test_the_way_back(format, seed):
    weight = random_weight(format, seed)
    kept = copied(weight)
    fp8 = torch.ones(2, dtype=torch.bool)
    fragment.to_fragment(weight, fp8)
    assert not torch.equal(weight.codes, kept.codes)
    copy = fragment.from_fragment(weight, fp8)
    fragment.to_canonical(weight, fp8)
    for found in (weight, copy):
        assert torch.equal(found.codes, kept.codes) and torch.equal(found.scales, kept.scales)


def test_largest_exponents():
    weight = random_weight("mxfp4", 3, experts=3)
    weight.codes[1] &= 0x88
    fp8 = torch.ones(3, dtype=torch.bool)
    canonical = copied(weight)
    fragment.to_fragment(canonical)
    expected = fragment.largest_exponents(canonical)
    fragment.to_fragment(weight, fp8)
    assert fragment.largest_exponents(weight, fp8).tolist() == expected.tolist()
    assert expected[1] == 0


def test_pieces_of_zeros_have_a_factor_in_range():
    weight = random_weight("mxfp4", 4, experts=1)
    weight.codes[0, :, 64:] &= 0x88  # the second piece of each row
    weight.scales[0, :, 4:] = 0
    fragment.to_fragment(weight, torch.ones(1, dtype=torch.bool))
    p = fragment.largest_exponents(weight, torch.ones(1, dtype=torch.bool)).numpy()
    assert np.isfinite(values_of(weight, p)).all()
    bytes_ = weight.scales.view(1, 1, 2, 128, 4).int()
    found = sum((bytes_[..., b] & 3) << (2 * b) for b in range(4))
    assert (found[0, 0, 1] == int(p[0]) + 127).all()


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
def test_experts_of_both_kinds(format):
    weight = random_weight(format, 5, experts=4)
    kept = copied(weight)
    fp8 = torch.tensor([True, False, False, True])
    fragment.to_fragment(weight, fp8)
    plain = copied(kept)
    fragment.to_fragment(plain)
    assert torch.equal(weight.codes[1:3], plain.codes[1:3])
    assert not torch.equal(weight.codes[0], plain.codes[0])
    back = fragment.from_fragment(weight, fp8)
    assert torch.equal(back.codes, kept.codes) and torch.equal(back.scales, kept.scales)
