"""prepare of the Triton path: nothing is copied, epilogue factors, refusals."""

import pytest
import torch

from exactmoe import ops
from exactmoe.errors import Unsupported
from exactmoe.formats import PackedWeight
from exactmoe.ops.triton.prepare import prepare
from layers import assert_same_bits
from paths import random_weight
from triton_experts import on_device


def test_nothing_is_copied(rng):
    weight = on_device(random_weight(rng, "nvfp4", 3, 8, 32))
    codes, scales, _, factors, *strides = prepare(weight).arguments
    assert codes is weight.codes and scales is weight.scales and factors is weight.global_scale
    assert strides == [8 * 16, 16, 8 * 2, 2]


@pytest.mark.parametrize(("format", "divide"), [("nvfp4", False), ("nvfp4-divide", True)])
def test_global_scales_are_kept_as_stored(format, divide, rng):
    weight = random_weight(rng, format, 3, 8, 32)
    prepared = prepare(on_device(weight))
    assert prepared.divide is divide
    assert_same_bits(prepared.factors.cpu(), weight.global_scale)


def test_mxfp4_has_the_largest_exponent_of_codes_that_are_not_zero():
    codes = torch.full((3, 1, 32), 0x11, dtype=torch.uint8)
    scales = torch.tensor([[[100, 90]], [[0, 0]], [[254, 200]]], dtype=torch.uint8)
    codes[2, 0, :16] = 0x80
    prepared = prepare(on_device(PackedWeight("mxfp4", codes, scales)))
    assert prepared.exponents.tolist() == [100, 0, 200]
    expected = torch.tensor([2.0**-27, 2.0**-127, 2.0**73])
    assert_same_bits(prepared.factors.cpu(), expected)  # a subnormal too


def test_columns_must_be_contiguous(rng):
    weight = random_weight(rng, "bf16", 2, 32, 16)
    turned = PackedWeight("bf16", weight.codes.transpose(1, 2))
    with pytest.raises(Unsupported, match="last stride 1"):
        prepare(turned)


def test_the_path_has_every_op():
    path = ops.path("triton")
    assert path.name == "triton" and path.storage is ops.DEVICE
    assert path.prepare is prepare
