"""`a8` activations: codes and scales against an independent scalar program (contract section 3)."""

import math

import numpy as np
import pytest
import torch

from exactmoe.reference import quantize
from layers import assert_same_bits

INF, NAN = float("inf"), float("nan")
# Magnitudes of E4M3 by code 0 ... 126, written from the format's definition.
E4M3 = [m * 2.0**-9 for m in range(8)]
E4M3 += [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)]


def nearest_code(value: float) -> int:
    """Nearest E4M3 code, ties to the even code, saturating; zero is 0x00."""
    magnitude = min(abs(value), 448.0)
    code = min(range(127), key=lambda c: (abs(E4M3[c] - magnitude), c & 1))
    return code | 0x80 if code and value < 0 else code


def scalar(group: list[float]) -> tuple[list[int], float]:
    """The rule for 128 float32 values, in plain Python."""
    if not all(math.isfinite(v) for v in group):
        return [0x7F] * 128, 1.0
    amax = max(max(abs(v) for v in group), float(np.float32(1e-4)))
    t = np.float32(amax) * np.float32(1 / 448)
    mantissa, exponent = math.frexp(float(t))  # t = mantissa x 2^exponent, mantissa in [0.5, 1)
    power = exponent - 1 + (mantissa != 0.5)
    return [nearest_code(v * 2.0**-power) for v in group], 2.0**power


def check(values: torch.Tensor) -> None:
    codes, scales = quantize(values)
    for row, values_of_row in enumerate(values.float().tolist()):
        for group in range(len(values_of_row) // 128):
            part = slice(group * 128, group * 128 + 128)
            expected_codes, expected_scale = scalar(values_of_row[part])
            assert codes[row, part].tolist() == expected_codes, (row, group)
            assert float(scales[row, group]) == expected_scale, (row, group)


@pytest.mark.parametrize(
    "size", [2.0**-140, 1e-30, 1e-6, 1e-3, 0.1, 1.0, 448.0, 1e6, 1e30, 2.0**126]
)
def test_quantize_is_the_scalar_rule(size, rng):
    values = torch.randn(4, 384, generator=rng) * size / 4
    values[1] = torch.randn(384, generator=rng) ** 9 * size * 1e-3
    check(values.clamp(-3e38, 3e38))
    check(values.clamp(-3e38, 3e38).bfloat16())


def test_quantize_at_every_kind_of_tie():
    # amax is 448, so the scale is 1: all midpoints of neighbours, both signs.
    middles = [(a + b) / 2 for a, b in zip(E4M3, E4M3[1:], strict=False)]
    near = [m * (1 + s * 2.0**-23) for m in middles for s in (-1, 0, 1)]
    numbers = [*near, *(-n for n in near), *E4M3, *(-v for v in E4M3)]
    numbers += [0.0] * (-len(numbers) % 127)
    rows = torch.tensor(numbers).view(-1, 127)
    values = torch.cat([torch.full((len(rows), 1), 448.0), rows], 1)
    check(values)
    assert (quantize(values)[1] == 1.0).all()


@pytest.mark.parametrize("amax", [1.0, 7.0, 448.0, 2.0**-3, 3 * 2.0**20])
def test_quantize_scale_is_the_power_of_two_at_or_above(amax):
    values = torch.zeros(3, 128)
    values[:, 5] = torch.tensor([amax, np.nextafter(np.float32(amax), np.float32(INF)), -amax])
    codes, scales = quantize(values)
    check(values)
    for scale in scales.flatten().tolist():
        assert math.frexp(scale)[0] == 0.5
        assert amax / scale <= 448.5
    if amax == 448.0:
        assert scales.flatten().tolist() == [1.0, 2.0, 1.0]
        assert codes[:, 5].tolist() == [0x7E, 0x76, 0xFE]


def test_quantize_floor_of_amax():
    values = torch.zeros(4, 128)
    values[1, 7], values[2, 7], values[3, 7] = 1e-4, 9e-5, 2.0**-30
    codes, scales = quantize(values)
    floor = 2.0 ** math.ceil(math.log2(1e-4 / 448))
    assert scales.flatten().tolist() == [floor] * 4
    assert codes[0].tolist() == [0] * 128
    assert codes[1, 7] == nearest_code(1e-4 / floor)
    check(values)


def test_quantize_zero_codes_are_plus_zero():
    values = torch.full((2, 128), -0.0)
    values[1, 0] = 448.0
    values[1, 1], values[1, 2] = -(2.0**-10), -(2.0**-10) * 1.01  # half a step rounds to zero
    codes, _ = quantize(values)
    assert codes[0].tolist() == [0] * 128
    assert codes[1, :4].tolist() == [0x7E, 0x00, 0x81, 0x00]


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_quantize_group_that_is_not_finite(bad, rng):
    clean = torch.randn(2, 384, generator=rng)
    values = clean.clone()
    values[1, 200] = bad
    codes, scales = quantize(values)
    expected_codes, expected_scales = quantize(clean)
    expected_codes[1, 128:256], expected_scales[1, 1] = 0x7F, 1.0
    assert_same_bits(codes, expected_codes)
    assert_same_bits(scales, expected_scales)


def test_quantize_largest_values_saturate_nothing():
    values = torch.zeros(1, 128)
    values[0, 0], values[0, 1] = 3.4028234663852886e38, -3.4028234663852886e38
    codes, scales = quantize(values)
    check(values)
    assert scales.isfinite().all()
    assert codes[0, 0] & 0x7F != 0x7F


def test_quantize_no_rows():
    codes, scales = quantize(torch.zeros(0, 256))
    assert codes.shape == (0, 256) and codes.dtype == torch.uint8
    assert scales.shape == (0, 2) and scales.dtype == torch.float32
