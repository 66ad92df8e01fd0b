"""FP8 128 x 128 blocks: what the bytes mean, against ml_dtypes; what is refused, and where."""

import ml_dtypes
import numpy as np
import pytest
import torch

from exactmoe.errors import ConfigError, Unsupported
from exactmoe.formats import PackedWeight, apply_global_scale, dequantize, fp8_exact, operand
from exactmoe.formats.scales import decode_e8m0
from layers import assert_same_bits

LEGAL = [byte for byte in range(256) if byte & 0x7F != 0x7F]
VALUES = np.array(LEGAL, np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def random_parts(rng, experts, rows, columns):
    """Legal codes and scales."""
    index = torch.randint(0, len(LEGAL), (experts, rows, columns), generator=rng)
    scales = torch.rand(experts, -(-rows // 128), -(-columns // 128), generator=rng) + 2.0**-20
    return torch.tensor(LEGAL, dtype=torch.uint8)[index], scales


def refuses(error, codes, scales, *words, global_scale=None):
    with pytest.raises(error) as caught:
        PackedWeight("fp8", codes, scales, global_scale)
    for word in words:
        assert word in str(caught.value), str(caught.value)


@pytest.mark.parametrize("scale", [1.0, 2.0**-127, 2.0**-149, 3.1e-4, 3e38])
def test_every_code_under_a_scale(scale):
    codes = torch.tensor(LEGAL + [0, 0x80], dtype=torch.uint8).view(1, 1, 256)
    weight = PackedWeight("fp8", codes, torch.full((1, 1, 2), scale))
    exact = np.append(VALUES, [0.0, -0.0])
    values = operand(weight, 0)
    assert_same_bits(values, torch.from_numpy(exact.astype(np.float32))[None])
    assert_same_bits(values.bfloat16().float(), values, "every operand is exactly a bf16")
    expected = torch.from_numpy(exact * np.float64(np.float32(scale)))
    assert_same_bits(dequantize(weight), expected.view(1, 1, 256))


@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (128, 128), (130, 144), (257, 400)])
def test_blocks_of_128_rows_and_128_columns(rows, columns, rng):
    codes, scales = random_parts(rng, 2, rows, columns)
    weight = PackedWeight("fp8", codes, scales)
    values = codes.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    exact = np.empty_like(values)
    for row in range(rows):
        for column in range(columns):
            scale = scales[:, row // 128, column // 128].double().numpy()
            exact[:, row, column] = values[:, row, column] * scale
    assert_same_bits(dequantize(weight), torch.from_numpy(exact))
    for expert in range(2):
        assert_same_bits(operand(weight, expert), torch.from_numpy(values[expert]).float())


def test_the_accumulator_is_left_as_it_is(rng):
    weight = PackedWeight("fp8", *random_parts(rng, 1, 16, 16))
    accumulator = torch.tensor([1.5, -0.0])
    assert apply_global_scale(weight, 0, accumulator) is accumulator


def test_e8m0_scales_are_powers_of_two_exactly():
    scales = decode_e8m0(torch.arange(255, dtype=torch.int32).to(torch.uint8)).view(255, 1, 1)
    weight = PackedWeight("fp8", torch.full((255, 1, 16), 0x3C, dtype=torch.uint8), scales)
    expected = np.arange(255, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    assert dequantize(weight)[:, 0, 0].tolist() == (1.5 * expected).tolist()


def test_sizes_bytes_and_units(rng):
    weight = PackedWeight("fp8", *random_parts(rng, 3, 130, 144))
    assert (weight.num_experts, weight.rows, weight.columns) == (3, 130, 144)
    assert weight.nbytes == 3 * 130 * 144 + 3 * 2 * 2 * 4
    assert fp8_exact(weight).tolist() == [True] * 3, "the operands are e4m3"


def test_a_thread_that_flushes_subnormals_refuses_no_scale(rng):
    codes, _ = random_parts(rng, 1, 1, 16)
    torch.set_flush_denormal(True)
    try:
        assert PackedWeight("fp8", codes, decode_e8m0(torch.zeros(1, 1, 1).byte())).rows == 1
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_codes_that_are_nan(byte, rng):
    codes, scales = random_parts(rng, 2, 130, 144)
    codes[1, 129, 140] = 0x7F
    codes[1, 64, 130] = byte
    place = f"code 0x{byte:02X} (NaN) at expert 1, row 64, block 1, column 130"
    refuses(ConfigError, codes, scales, place, "E4M3 without NaN")


@pytest.mark.parametrize("value", [0.0, -0.0, -1.0, -1e-45, float("nan"), -float("nan")])
@pytest.mark.parametrize("infinite", [False, True])
def test_scales_that_are_not_finite_and_positive(value, infinite, rng):
    codes, scales = random_parts(rng, 2, 130, 144)
    found = value * float("inf") if infinite and value not in (0.0,) else value
    scales[1, 1, 0] = found
    named = str(float(scales[1, 1, 0]))
    place = f"block scale {named} at expert 1, row 128, block 0"
    refuses(ConfigError, codes, scales, place, "finite, > 0")


def test_the_largest_and_the_smallest_scale_are_legal(rng):
    codes, _ = random_parts(rng, 1, 1, 144)
    scales = torch.tensor([[[1e-45, 3.4028234e38]]])
    assert PackedWeight("fp8", codes, scales).columns == 144
    scales[0, 0, 1] = float("inf")
    refuses(ConfigError, codes, scales, "block scale inf at expert 0, row 0, block 1")


def test_the_e8m0_byte_0xff(rng):
    codes, scales = random_parts(rng, 2, 130, 144)
    e8m0 = torch.full(scales.shape, 127, dtype=torch.uint8)
    e8m0[0, 1, 1] = 0xFF
    refuses(ConfigError, codes, decode_e8m0(e8m0), "at expert 0, row 128, block 1", "0xFF")


def test_dtypes_and_shapes(rng):
    codes, scales = random_parts(rng, 2, 130, 144)
    as_float8 = codes.view(torch.float8_e4m3fn)
    refuses(ConfigError, as_float8, scales, "codes is torch.float8_e4m3fn", "uint8")
    refuses(ConfigError, codes, scales.byte(), "scales is torch.uint8 (2, 2, 2)", "float32")
    refuses(ConfigError, codes, scales.double(), "scales is torch.float64", "float32")
    refuses(ConfigError, codes, None, "scales is None", "float32")
    refuses(ConfigError, codes, scales[:, :1], "(2, 1, 2)", "codes ask for (2, 2, 2)")
    refuses(ConfigError, codes, scales[..., :1], "(2, 2, 1)", "codes ask for (2, 2, 2)")
    refuses(
        ConfigError, codes, scales, "a fp8 weight has a global_scale", global_scale=torch.ones(2)
    )
    short = codes[..., :136]
    refuses(Unsupported, short, scales, "k is 136 in a fp8 weight", "multiple of 16")


def test_meta_tensors_are_checked_for_shape_only():
    codes = torch.empty(2, 130, 144, dtype=torch.uint8, device="meta")
    weight = PackedWeight("fp8", codes, torch.empty(2, 2, 2, device="meta"))
    assert (weight.rows, weight.columns) == (130, 144)
