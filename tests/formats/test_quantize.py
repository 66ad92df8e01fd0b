"""Quantisers against a scalar re-implementation in rational arithmetic, and their error bounds."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exactmoe.formats import PackedWeight, dequantize, quantize_mxfp4, quantize_nvfp4

PROPERTY = settings(max_examples=60, deadline=None, derandomize=True)
GRID = [Fraction(v) for v in ("0", "1/2", "1", "3/2", "2", "3", "4", "6")]
E4M3 = [Fraction(float(v)) for v in np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)]


def nearest(grid, value):
    """Index of the nearest of an ascending grid, ties to the even index; saturates at the end."""
    if value >= grid[-1]:
        return len(grid) - 1
    return min(range(len(grid)), key=lambda i: (abs(grid[i] - value), i % 2))


def f32(exact):
    """The float32 nearest to a non-negative Fraction below 2^128, ties to even, as a Fraction."""
    if exact == 0:
        return exact
    exponent = exact.numerator.bit_length() - exact.denominator.bit_length()
    exponent -= exact < Fraction(2) ** exponent
    step = Fraction(2) ** (max(exponent, -126) - 23)
    return round(exact / step) * step


def signed(code, value):
    return code | (8 if math.copysign(1, value) < 0 else 0)


def nvfp4_block(block, divisor, global_scale):
    """Scale byte, codes and exact squared error of one block of floats."""
    amax = Fraction(max(abs(v) for v in block))
    byte = nearest(E4M3, f32(f32(amax / divisor) / global_scale))
    step = f32(E4M3[byte] * global_scale)
    codes, error = [], Fraction(0)
    for value in block:
        quotient = f32(Fraction(abs(value)) / step) if step else Fraction(0)
        code = nearest(GRID, quotient)
        codes.append(signed(code, value))
        error += (GRID[code] * E4M3[byte] * global_scale - Fraction(abs(value))) ** 2
    return byte, codes, error


def nvfp4_expert(rows, rule):
    """Global scale, scale bytes and codes of one expert, given as lists of floats."""
    amax = max(abs(v) for values in rows for v in values)
    global_scale = f32(Fraction(amax) / 2688) or Fraction(1)
    scales, codes = [], []
    for values in rows:
        for start in range(0, len(values), 16):
            block = values[start : start + 16]
            byte, block_codes, error = nvfp4_block(block, 6, global_scale)
            if rule == "four_over_six":
                other = nvfp4_block(block, 4, global_scale)
                if other[2] < error:
                    byte, block_codes = other[:2]
            scales.append(byte)
            codes += block_codes
    return float(global_scale), scales, codes


def mxfp4_block(block, rule):
    """Scale byte and codes of one block of 32 floats."""
    amax = max(abs(v) for v in block)
    if amax == 0:
        return 0, [signed(0, v) for v in block]
    exponent = math.frexp(amax)[1] - 3
    if rule == "no_clip" and Fraction(amax) > 6 * Fraction(2) ** exponent:
        exponent += 1
    exponent = max(-127, min(127, exponent))
    step = Fraction(2) ** exponent
    return exponent + 127, [signed(nearest(GRID, Fraction(abs(v)) / step), v) for v in block]


def unpacked(weight):
    """Codes as a flat list, first column first."""
    return [c for byte in weight.codes.flatten().tolist() for c in (byte & 15, byte >> 4)]


def check_nvfp4(weight, rule):
    packed = quantize_nvfp4(weight, rule)
    experts = [nvfp4_expert(rows, rule) for rows in weight.float().tolist()]
    assert packed.global_scale.tolist() == [e[0] for e in experts]
    assert packed.scales.flatten().tolist() == sum((e[1] for e in experts), [])
    assert unpacked(packed) == sum((e[2] for e in experts), [])


def check_mxfp4(weight, rule):
    packed = quantize_mxfp4(weight, rule)
    blocks = [mxfp4_block(b, rule) for b in weight.float().reshape(-1, 32).tolist()]
    assert packed.scales.flatten().tolist() == [b[0] for b in blocks]
    assert unpacked(packed) == sum((b[1] for b in blocks), [])


def sample(rng, shape, dtype, kind):
    """Weights of several kinds: smooth, of wildly different sizes, on many midpoints, sparse."""
    values = torch.randn(shape, generator=rng)
    if kind == "wide":
        values *= 2.0 ** torch.randint(-40, 20, (*shape[:2], 1), generator=rng)
    elif kind == "midpoints":
        values = torch.randint(-28, 29, shape, generator=rng) * 0.25
    elif kind == "sparse":
        values *= torch.rand(shape, generator=rng) < 0.05
    elif kind == "subnormal":
        values *= 2.0**-124
    elif kind == "huge":
        values = torch.where(values.abs() > 1, 3e38, values * 1e38) * values.sign()
    return values.to(dtype)


KINDS = ["smooth", "wide", "midpoints", "sparse", "subnormal", "huge"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", ["modelopt", "four_over_six"])
def test_nvfp4_like_the_scalar_rule(rng, dtype, kind, rule):
    check_nvfp4(sample(rng, (2, 4, 64), dtype, kind), rule)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", ["ocp", "no_clip"])
def test_mxfp4_like_the_scalar_rule(rng, dtype, kind, rule):
    check_mxfp4(sample(rng, (2, 4, 96), dtype, kind), rule)


def any_bf16(low, high):
    """Bf16 bit patterns of either sign with exponent fields from low to high, or zeros."""
    magnitude = st.one_of(st.just(0), st.integers(low << 7, (high << 7) | 0x7F))
    return st.builds(lambda m, sign: m | sign, magnitude, st.sampled_from([0, 0x8000]))


def from_patterns(patterns, columns):
    values = torch.tensor(patterns, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return values.view(1, -1, columns)


@PROPERTY
@given(st.lists(any_bf16(0, 254), min_size=32, max_size=32))
def test_nvfp4_any_finite_bf16(patterns):
    check_nvfp4(from_patterns(patterns, 32), "modelopt")


@PROPERTY
@given(st.lists(any_bf16(0, 254), min_size=32, max_size=32), st.sampled_from(["ocp", "no_clip"]))
def test_mxfp4_any_finite_bf16(patterns, rule):
    check_mxfp4(from_patterns(patterns, 32), rule)


def half_step(ratio):
    """Half the distance between the neighbours of |w| / scale on the E2M1 grid, |w| up to 6."""
    return torch.where(ratio < 2, 0.25, torch.where(ratio < 4, 0.5, 1.0))


@pytest.mark.parametrize("kind", ["smooth", "midpoints", "huge"])
@pytest.mark.parametrize("rule", ["ocp", "no_clip"])
def test_mxfp4_error_is_at_most_half_a_step(rng, kind, rule):
    weight = sample(rng, (3, 16, 96), torch.float32, kind)
    packed = quantize_mxfp4(weight, rule)
    steps = 2.0 ** (packed.scales.double() - 127).repeat_interleave(32, -1)
    ratio = weight.double().abs() / steps
    error = (dequantize(packed) - weight.double()).abs() / steps  # exact: at most 24 bits each
    bound = torch.where(ratio > 6, ratio - 6, half_step(ratio))
    assert (error <= bound).all()
    if rule == "no_clip":
        assert ratio.max() <= 6
    else:
        assert 6 < ratio.max() < 8, "ocp saturates what lies between 6 and 8"


@pytest.mark.parametrize("kind", ["smooth", "midpoints", "huge"])
def test_nvfp4_error_is_at_most_half_a_step(rng, kind):
    weight = sample(rng, (3, 16, 96), torch.float32, kind)
    packed = quantize_nvfp4(weight)
    scales = torch.from_numpy(
        packed.scales.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    )
    steps = (scales * packed.global_scale.double()[:, None, None]).repeat_interleave(16, -1)
    normal = (packed.scales >= 8).repeat_interleave(16, -1)
    assert normal.float().mean() > 0.9
    ratio = weight.double().abs() / steps
    error = (dequantize(packed) - weight.double()).abs() / steps
    # The scale is at most 1/16 too small; step and quotient take one float32 rounding each.
    assert ratio[normal].max() <= 6 * (1 + 2**-4)
    assert (error <= half_step(ratio) + ratio * 2**-22)[normal].all()


def test_four_over_six_is_never_worse(rng):
    weight = sample(rng, (2, 16, 128), torch.bfloat16, "smooth")

    def error(rule):
        difference = dequantize(quantize_nvfp4(weight, rule)) - weight.double()
        return difference.square().unflatten(-1, (-1, 16)).sum(-1)

    plain, better = error("modelopt"), error("four_over_six")
    assert (better <= plain).all()
    assert (better < plain).float().mean() > 0.1


@PROPERTY
@given(
    st.lists(st.integers(0, 255), min_size=16, max_size=16),
    st.integers(0, 252),
    st.sampled_from(["ocp", "no_clip"]),
)
def test_mxfp4_values_are_fixed_points(codes, byte, rule):
    """Every MXFP4 value is reproduced: its largest magnitude becomes 4 or 6 of the new exponent (or
    the exponent is already the lowest), all others are representable beside it, and none clips."""
    packed = torch.tensor([[codes]], dtype=torch.uint8)
    weight = PackedWeight("mxfp4", packed, torch.tensor([[[byte]]], dtype=torch.uint8))
    values = dequantize(weight)
    again = quantize_mxfp4(values.float(), rule)
    assert dequantize(again).view(torch.int64).tolist() == values.view(torch.int64).tolist()
    if max(c & 7 for c in unpacked(weight)) >= 6:
        assert again.codes.tolist() == weight.codes.tolist()
        assert again.scales.tolist() == weight.scales.tolist()


@PROPERTY
@given(st.lists(st.integers(0, 255), min_size=16, max_size=16), st.integers(-20, 20))
def test_nvfp4_bytes_are_fixed_points_under_a_power_of_two(codes, exponent):
    """With 6 x 448 in the expert and 6 in each block, the global scale and all bytes come back."""
    packed = torch.tensor([[codes]], dtype=torch.uint8)
    packed[..., 0] |= 0x07
    packed[..., 8] |= 0x70
    scales = torch.tensor([[[0x7E, 0x2B]]], dtype=torch.uint8)
    weight = PackedWeight("nvfp4", packed, scales, torch.tensor([2.0**exponent]))
    again = quantize_nvfp4(dequantize(weight).float())
    assert again.global_scale.tolist() == [2.0**exponent]
    assert again.scales.tolist() == scales.tolist()
    assert again.codes.tolist() == packed.tolist()
