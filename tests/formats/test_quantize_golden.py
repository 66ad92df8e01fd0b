"""Quantisers against bytes derived by hand; the arithmetic stands beside each."""

import math

import pytest
import torch

from exactmoe.errors import ConfigError, Unsupported
from exactmoe.formats import dequantize, quantize, quantize_mxfp4, quantize_nvfp4


def row(*values, width=16):
    """Values, filled up with +0 to one block."""
    return [*values, *[0.0] * (width - len(values))]


def bf16(rows):
    """Rows of blocks -> bf16 [1, N, K]; every value is exactly a bf16."""
    values = torch.tensor(rows, dtype=torch.float32)
    assert torch.equal(values, values.bfloat16().float())
    return values.bfloat16()[None]


def hexed(tensor):
    return bytes(tensor.flatten().tolist()).hex(" ")


HUGE = 226 * 2.0**120  # 3e38 as bf16

# The largest value is 2688, so global = 2688 / 2688 = 1 and the steps are the block scales alone.
TIES = [2688.0, 112.0, 336.0, 560.0, 784.0, 1120.0, 1568.0, 2240.0]  # 6 and all midpoints, x 448
NVFP4_CASES = {
    # 2688 / 6 = 448 = 0x7E. w / 448: 6 -> 7; ties .25 -> 0 (code 0), .75 -> 1 (2), 1.25 -> 1 (2),
    # 1.75 -> 2 (4), 2.5 -> 2 (4), 3.5 -> 4 (6), 5 -> 4 (6); the negatives the same with bit 3.
    "ties": (TIES + [-v for v in TIES], 0x7E, "07 22 44 66 8f aa cc ee"),
    # 6.375 / 6 = 1.0625, halfway between 1 (0x38) and 1.125 (0x39): to the even byte 0x38.
    # 6.375 / 1 saturates to 6 (7), -6.375 to -6 (15), -0 stays (8), 0.24 -> 0.
    "scale tie down": (row(6.375, -6.375, -0.0, 0.234375), 0x38, "f7 08 00 00 00 00 00 00"),
    # 7.125 / 6 = 1.1875, halfway between 1.125 (0x39) and 1.25 (0x3A): to 0x3A.
    # 7.125 / 1.25 = 5.7 -> 6 (7); 3.125 / 1.25 = 2.5 -> 2 (4); -0.9375 / 1.25 = -.75 -> -1 (10).
    "scale tie up": (row(7.125, 3.125, -0.9375), 0x3A, "47 0a 00 00 00 00 00 00"),
    # Zeros: scale +0, codes keep their signs.
    "zeros": (row(0.0, -0.0, -0.0), 0x00, "80 08 00 00 00 00 00 00"),
    # 6 x 2^-10 / 6 = 2^-10, halfway between 0 and 2^-9: to the even byte 0. Zeros with signs.
    "scale underflow": (row(-6 * 2.0**-10, 2.0**-10), 0x00, "08 00 00 00 00 00 00 00"),
    # 9 x 2^-10 / 6 = 1.5 x 2^-10 -> 2^-9 = 0x01. 9 x 2^-10 / 2^-9 = 4.5 -> 4 (6).
    "smallest scale": (row(9 * 2.0**-10), 0x01, "06 00 00 00 00 00 00 00"),
    # 18 x 2^-9 / 6 = 3 x 2^-9 = 0x03, subnormal and exact. -18 -> -6 (15); 9 x 2^-9 -> 3 (5).
    "subnormal scale": (row(-18 * 2.0**-9, 9 * 2.0**-9), 0x03, "5f 00 00 00 00 00 00 00"),
    # A subnormal bf16 beside the large values is zero, with its sign.
    "subnormal value": (row(-(2.0**-133)), 0x00, "08 00 00 00 00 00 00 00"),
}


def test_nvfp4_bytes():
    blocks = [values for values, _, _ in NVFP4_CASES.values()]
    weight = quantize_nvfp4(bf16([sum(blocks, [])]))
    assert weight.global_scale.tolist() == [1.0]
    codes = weight.codes.view(-1, 8)
    for index, (name, (_, scale, expected)) in enumerate(NVFP4_CASES.items()):
        assert int(weight.scales[0, 0, index]) == scale, name
        assert hexed(codes[index]) == expected, name


def test_nvfp4_each_expert_has_its_own_global_scale():
    # Expert 0: zeros, global 1. Expert 1: 168 = 2688 / 16. Expert 2: 1 / 2688 = 2^-12 x 1.5238095,
    # and .5238095 x 2^23 = 4394032.8 -> 4394033 = 0x430C31: bits 0x39C30C31.
    # Experts 1 and 3: 6, 2 (code 4) and -0.5 (code 9) in units of 448 x global.
    experts = torch.zeros(4, 1, 16)
    experts[0, 0, 3] = -0.0
    experts[1, 0, :3] = torch.tensor([168.0, 56.0, -14.0])
    experts[2, 0, 0] = 1.0
    experts[3, 0, :3] = torch.tensor([2688.0, 896.0, -224.0])
    weight = quantize_nvfp4(experts.bfloat16())
    assert weight.global_scale.view(torch.int32).tolist() == [
        *(0x3F800000, 0x3D800000, 0x39C30C31, 0x3F800000)
    ]
    assert weight.scales.flatten().tolist() == [0x00, 0x7E, 0x7E, 0x7E]
    assert [hexed(codes) for codes in weight.codes] == [
        "00 80 00 00 00 00 00 00",
        "47 09 00 00 00 00 00 00",
        "07 00 00 00 00 00 00 00",
        "47 09 00 00 00 00 00 00",
    ]


def test_nvfp4_huge_and_subnormal_experts():
    # 3e38 as bf16: 3e38 / 2^127 = 1.763 -> 226 / 128, so it is 226 x 2^120. amax / 6 / global is
    # 448 within some roundings -> 0x7E. In units of amax / 6: 6 (7), 37 / 226 x 6 = .98 -> 1 (2),
    # -113 / 226 x 6 = -3 (13).
    assert float(torch.tensor(3e38).bfloat16()) == HUGE
    weight = quantize_nvfp4(bf16([row(HUGE, 37 * 2.0**120, -113 * 2.0**120)]))
    assert (int(weight.scales), hexed(weight.codes)) == (0x7E, "27 0d 00 00 00 00 00 00")
    assert dequantize(weight).isfinite().all()
    # 2^-133, the smallest bf16: / 2688 = 65536 / 2688 = 24.4 -> 24 units of 2^-149. Then
    # 65536 / 6 = 10922.67 -> 10923 units, / 24 = 455.1 -> 448. 65536 / (448 x 24) = 6.1 -> 6.
    weight = quantize_nvfp4(bf16([row(2.0**-133, -(2.0**-133))]))
    assert weight.global_scale.tolist() == [24 * 2.0**-149]
    assert (int(weight.scales), hexed(weight.codes)) == (0x7E, "f7 00 00 00 00 00 00 00")
    # 2^-140 in float32: / 2688 = 512 / 2688 = 0.19 units -> 0, so global = 1 and all is zero.
    weight = quantize_nvfp4(torch.tensor([[row(-(2.0**-140))]]))
    assert weight.global_scale.tolist() == [1.0]
    assert (int(weight.scales), hexed(weight.codes)) == (0x00, "08 00 00 00 00 00 00 00")


def test_nvfp4_four_over_six_keeps_the_smaller_error():
    # Global 1 (2688 in block 0, where amax / 4 = 672 saturates to 448 and changes nothing).
    # Block 1: 24, 18. Over 6: scale 4; 6 -> 6, 4.5 -> 4: error (18 - 16)^2 = 4.
    #          Over 4: scale 6 (0x4C); 4 -> 4 (6), 3 -> 3 (5): error 0. Kept.
    # Block 2: 24, 16. Over 6: scale 4 (0x48); 6, 4 -> codes 7, 6: error 0. Over 4: 16 / 6 = 2.67
    #          -> 3: error 4. Not kept.
    # Block 3: 24. Both exact: over 6 stays.
    blocks = [row(2688.0), row(24.0, 18.0), row(24.0, 16.0), row(24.0)]
    weight = quantize_nvfp4(bf16([sum(blocks, [])]), "four_over_six")
    assert weight.global_scale.tolist() == [1.0]
    assert hexed(weight.scales) == "7e 4c 48 48"
    assert hexed(weight.codes.view(-1, 8)[:, 0]) == "07 56 67 07"
    plain = quantize_nvfp4(bf16([sum(blocks, [])]))
    assert hexed(plain.scales) == "7e 48 48 48"
    assert hexed(plain.codes.view(-1, 8)[:, 0]) == "07 67 67 07"


MXFP4_TIES = [6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
# (values, byte and first codes under "ocp", byte and first codes under "no_clip")
MXFP4_CASES = {
    # floor(log2 6) - 2 = 0 -> byte 127; 6 -> 7 and the ties to the even codes.
    "ties": (MXFP4_TIES + [-v for v in MXFP4_TIES], 127, "07 22 44 66 8f aa cc ee", None, None),
    # floor(log2 7.5) - 2 = 0: 7.5 saturates to 6. no_clip: 7.5 > 6, so 2^1: 3.75 -> 4 (6),
    # and 3 / 2 = 1.5 (3) instead of 3 (5).
    "saturates": ([7.5, 3.0, -0.0], 127, "57 08", 128, "36 08"),
    # 6.5 > 6: ocp gives 6 (7); no_clip 3.25 -> 3 (5).
    "just above 6": ([-6.5], 127, "0f", 128, "0d"),
    # 4 = 2^2: exponent 0, code 6. 3.984375 < 4: exponent -1, 7.97 saturates; no_clip: 3.98 -> 4.
    "a power of two": ([4.0], 127, "06", None, None),
    "just below": ([3.984375], 126, "07", 127, "06"),
    "zeros": ([0.0, -0.0], 0, "80", None, None),
    # floor(log2 3e38) = 127 -> exponent 125, byte 252; 7.06 saturates. no_clip: 3.53 -> 4 (6).
    "huge": ([HUGE, -HUGE], 252, "f7", 253, "e6"),
    # 2^-124 = 4 x 2^-126: byte 1, code 6. Byte 0 (2^-127) is the last:
    "byte 1": ([2.0**-124], 1, "06", None, None),
    # 2^-125 = 4 x 2^-127 (code 6), and 2^-126 = 2 x 2^-127 (code 4).
    "byte 0": ([2.0**-125], 0, "06", None, None),
    "below byte 0": ([2.0**-126], 0, "04", None, None),
    # Subnormal: 2^-128 / 2^-127 = 0.5 (1); -2^-129 = -0.25, a tie to -0 (8).
    "subnormal": ([2.0**-128, -(2.0**-129)], 0, "81", None, None),
    # 2^-133 / 2^-127 = 2^-6 -> 0, sign kept.
    "vanishing": ([-(2.0**-133)], 0, "08", None, None),
}


@pytest.mark.parametrize("name", MXFP4_CASES)
def test_mxfp4_bytes(name):
    values, byte, codes, clip_byte, clip_codes = MXFP4_CASES[name]
    weight = bf16([row(*values, width=32)])
    for rule, expected_byte, expected in (
        ("ocp", byte, codes),
        ("no_clip", clip_byte if clip_byte is not None else byte, clip_codes or codes),
    ):
        packed = quantize_mxfp4(weight, rule)
        assert int(packed.scales) == expected_byte, rule
        length = len(expected.split())
        assert hexed(packed.codes[..., :length]) == expected, rule
        assert hexed(packed.codes[..., length:]) == " ".join(["00"] * (16 - length)), rule
        assert packed.global_scale is None


def test_mxfp4_blocks_are_32_wide_and_alone():
    weight = quantize_mxfp4(bf16([row(*[1.0] * 32, *[0.25] * 32, width=64), [16.0] * 64]))
    assert weight.scales.tolist() == [[[125, 123], [129, 129]]]
    assert hexed(weight.codes) == " ".join(["66"] * 64)


@pytest.mark.parametrize("quantizer", [quantize_nvfp4, quantize_mxfp4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused_by_place(quantizer, dtype, value):
    weight = torch.ones(3, 4, 64, dtype=dtype)
    weight[2, 3, 60] = math.nan
    weight[2, 1, 33] = value
    with pytest.raises(ConfigError, match=rf"weight is {value} at expert 2, row 1, column 33"):
        quantizer(weight)


@pytest.mark.parametrize("quantizer", [quantize_nvfp4, quantize_mxfp4])
def test_other_inputs_are_refused(quantizer):
    with pytest.raises(ConfigError, match=r"rule is 'best'; allowed: (modelopt|ocp), "):
        quantizer(torch.ones(1, 1, 64), "best")
    for bad in (torch.ones(1, 1, 64).half(), torch.ones(1, 1, 64).double(), torch.ones(1, 64)):
        with pytest.raises(ConfigError, match="allowed: bfloat16 or float32") as caught:
            quantizer(bad)
        assert f"{bad.dtype} {tuple(bad.shape)}" in str(caught.value)
    for shape in ((0, 1, 64), (1, 0, 64), (1, 1, 0)):
        with pytest.raises(ConfigError, match=r"no empty dimension"):
            quantizer(torch.ones(shape))
    for columns in (1, 8, 17, 33, 40):
        with pytest.raises(Unsupported, match=rf"k is {columns} in a (nvfp4|mxfp4) weight"):
            quantizer(torch.ones(1, 1, columns))


def test_quantize_takes_the_first_rule_and_named_ones():
    weight = torch.linspace(-7, 7, 128).view(2, 1, 64)
    for format, rules, quantizer in (
        ("nvfp4", ("modelopt", "four_over_six"), quantize_nvfp4),
        ("mxfp4", ("ocp", "no_clip"), quantize_mxfp4),
    ):
        default = quantize(weight, format)
        results = [quantize(weight, format, rule) for rule in rules]
        assert default.format == format
        assert torch.equal(default.codes, results[0].codes)
        assert torch.equal(default.scales, results[0].scales)
        assert not torch.equal(results[0].scales, results[1].scales)
        assert torch.equal(quantizer(weight).codes, default.codes)
    with pytest.raises(ConfigError, match="format is 'bf16'; allowed: nvfp4, mxfp4"):
        quantize(weight, "bf16")


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_the_input_is_not_written(format):
    weight = torch.linspace(-3, 3, 64).view(1, 1, 64)
    before = weight.clone()
    quantize(weight, format)
    assert torch.equal(weight, before)
