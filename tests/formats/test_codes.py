"""E2M1, E4M3 and E8M0, code by code, against ml_dtypes (field faults A4, A6)."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exactmoe.formats import e2m1
from exactmoe.formats.scales import (
    decode_e4m3,
    decode_e8m0,
    encode_e4m3,
    floor_log2,
    power_of_two,
)

ALL_BYTES = torch.arange(256, dtype=torch.int32).to(torch.uint8)
PROPERTY = settings(max_examples=200, deadline=None, derandomize=True)


def bits(values):
    """The 32 bits of each float32."""
    return values.contiguous().view(torch.int32).tolist()


def oracle(codes, dtype):
    """What ml_dtypes reads from code bytes, as float32."""
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(codes.numpy().view(dtype).astype(np.float32))


def finite_bf16():
    """All 65280 finite bf16 values, as float32."""
    values = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    return values[values.isfinite()]


def around(values):
    """Float32 values with their lower and upper neighbours, and the negatives of all."""
    array = np.asarray(values, dtype=np.float32)
    low, high = np.nextafter(array, np.float32(-np.inf)), np.nextafter(array, np.float32(np.inf))
    near = np.concatenate([low, array, high])
    return torch.from_numpy(np.concatenate([near, -near]))


def test_e2m1_decodes_all_codes_with_minus_zero():
    codes = torch.arange(16, dtype=torch.uint8)
    assert bits(e2m1.decode(codes)) == bits(oracle(codes, ml_dtypes.float4_e2m1fn))
    assert bits(e2m1.decode(codes))[8] == -(2**31), "code 8 is -0"


def test_e2m1_encodes_every_finite_bf16_like_ml_dtypes():
    values = finite_bf16()
    expected = values.numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    assert e2m1.encode(values).tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("midpoint", "code"),
    # The two neighbours of each midpoint are codes n and n + 1; the even one wins.
    [(0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5.0, 6)],
)
def test_e2m1_ties_go_to_the_even_code(midpoint, code):
    below, above = np.nextafter(np.float32(midpoint), np.float32([0, 9]))
    lower = {0.25: 0, 0.75: 1, 1.25: 2, 1.75: 3, 2.5: 4, 3.5: 5, 5.0: 6}[midpoint]
    values = torch.tensor([below, midpoint, above, -below, -midpoint, -above])
    assert e2m1.encode(values).tolist() == [
        *(lower, code, lower + 1),
        *(8 + lower, 8 + code, 8 + lower + 1),
    ]


def test_e2m1_saturates_and_keeps_the_sign_of_zero():
    values = torch.tensor([6.0, 7.0, 8.0, 3e38, math.inf, -6.5, -math.inf, 0.0, -0.0, -1e-45])
    assert e2m1.encode(values).tolist() == [7, 7, 7, 7, 7, 15, 15, 0, 8, 8]


def test_every_byte_survives_unpack_decode_encode_pack():
    codes = e2m1.unpack(ALL_BYTES)
    assert e2m1.pack(codes).tolist() == ALL_BYTES.tolist()
    assert e2m1.encode(e2m1.decode(codes)).tolist() == codes.tolist()


def test_the_low_nibble_is_the_even_column():
    assert e2m1.decode(e2m1.unpack(torch.tensor([0x71], dtype=torch.uint8))).tolist() == [0.5, 6.0]
    assert e2m1.pack(torch.tensor([1, 7], dtype=torch.uint8)).tolist() == [0x71]


@PROPERTY
@given(st.lists(st.lists(st.integers(0, 15), min_size=8, max_size=8), min_size=1, max_size=4))
def test_unpack_inverts_pack(rows):
    codes = torch.tensor(rows, dtype=torch.uint8)
    packed = e2m1.pack(codes)
    assert packed.tolist() == [
        [a + 16 * b for a, b in zip(r[::2], r[1::2], strict=True)] for r in rows
    ]
    assert torch.equal(e2m1.unpack(packed), codes)


def test_e4m3_decodes_all_bytes():
    expected = oracle(ALL_BYTES, ml_dtypes.float8_e4m3fn)
    nan = expected.isnan()
    assert nan.nonzero().flatten().tolist() == [0x7F, 0xFF]
    assert bits(decode_e4m3(ALL_BYTES)[~nan]) == bits(expected[~nan])
    assert decode_e4m3(ALL_BYTES)[nan].isnan().all()


def test_e4m3_encodes_ties_to_even_and_saturates():
    magnitudes = oracle(ALL_BYTES[:0x7F], ml_dtypes.float8_e4m3fn)
    midpoints = (magnitudes[1:] + magnitudes[:-1]) / 2
    values = torch.cat([around(magnitudes), around(midpoints), finite_bf16()])
    clipped = np.clip(values.numpy(), -448, 448)
    assert encode_e4m3(values).tolist() == (
        clipped.astype(ml_dtypes.float8_e4m3fn).view(np.uint8).tolist()
    )
    # 464 is the midpoint between 448 and the 480 that does not exist.
    special = torch.tensor([464.0, 465.0, 3e38, math.inf, -math.inf, math.nan, -math.nan, -0.0])
    assert encode_e4m3(special).tolist() == [0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x7F, 0x7F, 0x80]


def test_e8m0_decodes_all_bytes():
    decoded, expected = decode_e8m0(ALL_BYTES), oracle(ALL_BYTES, ml_dtypes.float8_e8m0fnu)
    assert bits(decoded[:255]) == bits(expected[:255])
    assert decoded[255].isnan()
    # Field fault A4: no byte but 0xFF is special.
    assert decoded[[0, 1, 134, 254]].tolist() == [2.0**-127, 2.0**-126, 128.0, 2.0**127]


def test_power_of_two_reaches_subnormals_zero_and_inf():
    exponents = torch.arange(-1200, 1200, dtype=torch.int32)
    expected = [0.0 if e < -149 else math.inf if e > 127 else 2.0**e for e in range(-1200, 1200)]
    assert power_of_two(exponents).tolist() == expected


def test_floor_log2_of_every_positive_bf16_and_the_powers_of_two():
    powers = around([2.0**e for e in range(-148, 128)])
    values = torch.cat([finite_bf16(), powers])
    values = values[values > 0]
    expected = [math.frexp(v)[1] - 1 for v in values.tolist()]
    assert floor_log2(values).tolist() == expected
    assert floor_log2(values).dtype == torch.int32


@PROPERTY
@given(st.integers(1, 0x7F7FFFFF))
def test_floor_log2_of_float32_bits(pattern):
    value = torch.tensor([pattern], dtype=torch.int32).view(torch.float32)
    low = floor_log2(value).item()
    assert 2.0**low <= value.item() < 2.0 ** (low + 1)


def test_power_of_two_does_not_depend_on_the_callers_flushing():
    exponents = torch.arange(-151, 130)
    expected = power_of_two(exponents).view(torch.int32)
    assert torch.set_flush_denormal(True)
    try:
        found = power_of_two(exponents).view(torch.int32)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(found, expected)
