"""prepare: addresses into the packed bytes, epilogue factors, refusals."""

import ctypes

import numpy as np
import pytest
import torch

from exactmoe.errors import Unsupported
from exactmoe.formats import PackedWeight
from exactmoe.formats.scales import power_of_two
from exactmoe.kernels.cpu.project import TILES
from exactmoe.ops.cpu.prepare import _powers_of_two, prepare
from paths import random_weight


def test_nothing_is_copied(rng):
    weight = random_weight(rng, "nvfp4", 3, 8, 32)
    prepared = prepare(weight)
    assert weight.scales is not None
    assert prepared.experts[:, 0].tolist() == [w.data_ptr() for w in weight.codes]
    assert prepared.experts[:, 1].tolist() == [w.data_ptr() for w in weight.scales]
    held = sum(array.nbytes for array in prepared.arrays)
    assert held <= 3 * 28 + 12 * 8


def test_factors(rng):
    nvfp4 = random_weight(rng, "nvfp4", 3, 4, 32)
    assert nvfp4.global_scale is not None
    assert prepare(nvfp4).factors.tolist() == nvfp4.global_scale.tolist()
    assert prepare(random_weight(rng, "bf16", 2, 4, 32)).factors.tolist() == [1.0, 1.0]
    codes = torch.full((3, 1, 32), 0x11, dtype=torch.uint8)
    scales = torch.tensor([[[100, 90]], [[0, 0]], [[254, 200]]], dtype=torch.uint8)
    codes[2, 0, :16] = 0x80  # zeros do not decide the largest exponent
    factors = prepare(PackedWeight("mxfp4", codes, scales)).factors
    assert factors.tolist() == [2.0**-27, 2.0**-127, 2.0**73]


def test_powers_of_two_by_bits():
    exponents = np.arange(-200, 128)
    expected = power_of_two(torch.from_numpy(exponents)).numpy()
    assert np.array_equal(_powers_of_two(exponents).view(np.uint32), expected.view(np.uint32))


def test_columns_must_be_contiguous(rng):
    weight = random_weight(rng, "bf16", 2, 32, 16)
    turned = PackedWeight("bf16", weight.codes.transpose(1, 2))
    with pytest.raises(Unsupported, match="last stride 1"):
        prepare(turned)


def test_bf16_weights_of_every_size_are_not_fused():
    """A product with a tiny weight may be inexact, and an fma would not round it."""
    values = torch.ones(1, 4, 32).bfloat16()
    fused = prepare(PackedWeight("bf16", values)).layout
    assert fused[TILES] != fused[TILES + 3]
    for value in (2.0**-49, 2.0**49, float("inf")):
        values = torch.ones(1, 4, 32).bfloat16()
        values[0, 3, 31] = value
        plain = prepare(PackedWeight("bf16", values)).layout
        assert plain[TILES : TILES + 3].tolist() == plain[TILES + 3 :].tolist()


@pytest.mark.parametrize(("format", "byte", "scale"), [("nvfp4", 0x53, 11.0), ("mxfp4", 100, 1.0)])
def test_a_table_has_the_operands_of_every_code_in_one_cache_line(format, byte, scale):
    scales = torch.full((1, 1, 1), byte, dtype=torch.uint8)
    codes = torch.full((1, 1, 16 if format == "mxfp4" else 8), 0x22, dtype=torch.uint8)
    factor = torch.ones(1) if format == "nvfp4" else None
    row = int(prepare(PackedWeight(format, codes, scales, factor)).experts[0, 2]) + 64 * byte
    assert row % 64 == 0
    found = np.frombuffer((ctypes.c_float * 16).from_address(row), np.float32)
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    expected = scale * np.array(magnitudes + [-m for m in magnitudes], np.float32)
    assert found.tobytes() == expected.tobytes()
