"""fp8_exact: which experts the fp8 units multiply without losing a bit (contract section 3)."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exactmoe.errors import ConfigError
from exactmoe.formats import PackedWeight, fp8_exact
from exactmoe.formats.units import NO_POWERS, piece_spans

PROPERTY = settings(max_examples=300, deadline=None, derandomize=True)
BLOCK = {"nvfp4": 16, "mxfp4": 32}
# E4M3 bytes of 2^-9 ... 2^8: three subnormals, then exponent fields with mantissa zero.
E4M3_POWERS = [1, 2, 4, *range(8, 0x7F, 8)]


def weight_of(format, exponents, zero_blocks=()):
    """One expert of one row, whose blocks have these exponents; zero_blocks hold zero codes."""
    codes = torch.full((1, 1, len(exponents), BLOCK[format] // 2), 0x08, dtype=torch.uint8)
    codes[..., 3] = 0x70
    codes[:, :, list(zero_blocks)] = 0x80
    if format == "mxfp4":
        scales = [e + 127 for e in exponents]
        return PackedWeight(format, codes.flatten(-2), torch.tensor([[scales]], dtype=torch.uint8))
    scales = [E4M3_POWERS[e + 9] for e in exponents]
    scales = torch.tensor([[scales]], dtype=torch.uint8)
    return PackedWeight(format, codes.flatten(-2), scales, torch.tensor([0.37]))


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize(("span", "exact"), [(0, True), (13, True), (14, True), (15, False)])
def test_fourteen_binades_within_a_piece(format, span, exact):
    blocks = 128 // BLOCK[format]
    low = -9
    assert fp8_exact(weight_of(format, [low] * (blocks - 1) + [low + span])).tolist() == [exact]
    assert fp8_exact(weight_of(format, [low + span] + [low] * (blocks - 1))).tolist() == [exact]
    # The last piece may be narrower than 128.
    tail = [low] * blocks + [low + span, low]
    assert fp8_exact(weight_of(format, tail)).tolist() == [exact]


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_spans_across_pieces_rows_experts_and_zero_blocks_are_free(format):
    blocks = 128 // BLOCK[format]
    assert fp8_exact(weight_of(format, [-9] * blocks + [8] * blocks)).tolist() == [True]
    high = [-9] * (blocks - 1) + [8]
    assert fp8_exact(weight_of(format, high)).tolist() == [False]
    assert fp8_exact(weight_of(format, high, zero_blocks=[blocks - 1])).tolist() == [True]
    rows = [weight_of(format, [e] * blocks) for e in (-9, 8)]
    globals_ = rows[0].global_scale
    codes = torch.cat([r.codes for r in rows], 1)
    scales = torch.cat([r.scales for r in rows], 1)
    assert fp8_exact(PackedWeight(format, codes, scales, globals_)).tolist() == [True]


def test_each_expert_is_decided_alone():
    good, bad = weight_of("mxfp4", [0, 14]), weight_of("mxfp4", [0, 15])
    codes = torch.cat([good.codes, bad.codes, good.codes])
    scales = torch.cat([good.scales, bad.scales, good.scales])
    assert fp8_exact(PackedWeight("mxfp4", codes, scales)).tolist() == [True, False, True]


@pytest.mark.parametrize("byte", range(0x7F))
def test_nvfp4_scales_must_be_powers_of_two_where_a_code_is_not_zero(byte):
    value = float(np.uint8(byte).view(ml_dtypes.float8_e4m3fn))
    scales = torch.tensor([[[byte]]], dtype=torch.uint8)
    codes = torch.zeros(1, 1, 8, dtype=torch.uint8)
    zeros = PackedWeight("nvfp4", codes, scales, torch.ones(1))
    assert fp8_exact(zeros).tolist() == [True]
    codes = codes.clone()
    codes[0, 0, 7] = 0x90
    # A zero scale over a non-zero code is no power of two.
    expected = value > 0 and math.frexp(value)[0] == 0.5
    assert fp8_exact(PackedWeight("nvfp4", codes, scales, torch.ones(1))).tolist() == [expected]


def test_bf16_weights_have_no_fp8_operands():
    weight = PackedWeight("bf16", torch.ones(3, 1, 16, dtype=torch.bfloat16))
    assert fp8_exact(weight).tolist() == [False] * 3


def test_fourteen_is_what_e4m3_can_hold():
    """Why 14: some shift holds every code under both ends exactly for a span of 14, none for 15."""
    codes = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)

    def held(shift):
        values = codes * 2.0**shift
        with np.errstate(invalid="ignore"):
            return bool((values.astype(ml_dtypes.float8_e4m3fn).astype(np.float64) == values).all())

    assert [s for s in range(-40, 40) if held(s)] == list(range(-8, 7))


def brute_force(codes, scales, format):
    """The rule of section 3 for one expert, block by block."""
    block = BLOCK[format]
    for row_codes, row_scales in zip(codes, scales, strict=True):
        for start in range(0, len(row_codes), 128):
            seen = []
            for first in range(start, min(start + 128, len(row_codes)), block):
                if all(code in (0, 8) for code in row_codes[first : first + block]):
                    continue
                byte = np.uint8(row_scales[first // block])
                kind = {"nvfp4": ml_dtypes.float8_e4m3fn, "mxfp4": ml_dtypes.float8_e8m0fnu}[format]
                mantissa, exponent = math.frexp(float(byte.view(kind)))
                if mantissa != 0.5:
                    return False
                seen.append(exponent)
            if seen and max(seen) - min(seen) > 14:
                return False
    return True


@PROPERTY
@given(
    st.sampled_from(["nvfp4", "mxfp4"]),
    st.sampled_from([32, 96, 128, 160, 256]),
    st.integers(0, 17),
    st.sampled_from([0.0, 0.02, 0.5]),
    st.integers(0, 2**32 - 1),
)
def test_like_brute_force_on_random_banks(format, columns, span, odd_share, seed):
    rng = np.random.default_rng(seed)
    shape = (4, 2, columns // BLOCK[format])
    if format == "mxfp4":
        scales = rng.integers(100, 101 + span, shape)
    else:
        scales = np.asarray(E4M3_POWERS)[rng.integers(0, 1 + span, shape)]
        scales = np.where(rng.random(shape) < odd_share, rng.integers(0, 0x7F, shape), scales)
    codes = rng.integers(0, 16, (*shape, BLOCK[format]))
    sparse = np.where(rng.random(codes.shape) < 0.05, codes, rng.choice([0, 8], codes.shape))
    codes = np.where(rng.random(shape)[..., None] < 0.4, sparse, codes).reshape(4, 2, columns)
    packed = torch.from_numpy((codes[..., 0::2] + 16 * codes[..., 1::2]).astype(np.uint8))
    global_scale = torch.full((4,), 3.85e-5) if format == "nvfp4" else None
    weight = PackedWeight(format, packed, torch.from_numpy(scales.astype(np.uint8)), global_scale)
    expected = [brute_force(codes[e].tolist(), scales[e].tolist(), format) for e in range(4)]
    assert fp8_exact(weight).tolist() == expected


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_spans(format):
    """The widest piece of any row; zero blocks do not count; nothing is a span of 0."""
    blocks = 128 // BLOCK[format]
    mixed = [-9] * (blocks - 1) + [3] + [-9] * blocks
    assert piece_spans(weight_of(format, mixed)).tolist() == [12]
    assert piece_spans(weight_of(format, mixed, zero_blocks=[blocks - 1])).tolist() == [0]
    assert piece_spans(weight_of(format, [-9, 8], zero_blocks=[0, 1])).tolist() == [0]
    assert piece_spans(weight_of(format, [-9, 8])).tolist() == [17]


def test_spans_of_scales_that_are_no_powers_of_two():
    weight = weight_of("nvfp4", [0, 1])
    weight.scales[0, 0, 1] |= 1
    assert piece_spans(weight).tolist() == [NO_POWERS]
    weight.codes[0, 0, 8:] = 0x80
    assert piece_spans(weight).tolist() == [0]


@pytest.mark.parametrize("format", ["bf16", "fp8"])
def test_other_formats_have_no_spans(format):
    scales = None if format == "bf16" else torch.ones(1, 1, 1)
    codes = torch.zeros(1, 1, 16, dtype=torch.bfloat16 if format == "bf16" else torch.uint8)
    with pytest.raises(ConfigError, match=f"format is '{format}'; allowed: nvfp4, mxfp4"):
        piece_spans(PackedWeight(format, codes, scales))
