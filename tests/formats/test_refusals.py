"""What a PackedWeight refuses; each message names the place, the value and what is allowed."""

import pytest
import torch

from exactmoe.errors import ConfigError, Unsupported
from exactmoe.formats import PackedWeight, apply_global_scale, exponent_range


def parts(format, experts=2, rows=3, columns=64):
    """Legal parts of a weight: codes, scales, global_scale."""
    if format == "bf16":
        return [torch.ones(experts, rows, columns, dtype=torch.bfloat16), None, None]
    block = {"nvfp4": 16, "mxfp4": 32}[format]
    codes = torch.full((experts, rows, columns // 2), 0x22, dtype=torch.uint8)
    scales = torch.full((experts, rows, columns // block), 0x38, dtype=torch.uint8)
    return [codes, scales, torch.ones(experts) if format == "nvfp4" else None]


def refuses(error, format, changed, *words, op="multiply"):
    """Raises `error` with every word in its message; `changed`: index of a part -> its value."""
    values = [changed.get(i, part) for i, part in enumerate(parts(format))]
    with pytest.raises(error) as caught:
        PackedWeight(format, *values, global_scale_op=op)
    for word in words:
        assert word in str(caught.value), str(caught.value)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "bf16"])
def test_the_unchanged_parts_are_accepted(format):
    assert PackedWeight(format, *parts(format)).columns == 64


@pytest.mark.parametrize("format", ["fp4", "NVFP4", None, ["nvfp4"]])
def test_format(format):
    with pytest.raises(ConfigError, match="format is") as caught:
        PackedWeight(format, *parts("nvfp4"))
    assert repr(format) in str(caught.value)
    assert "nvfp4, mxfp4, bf16" in str(caught.value)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "bf16"])
def test_global_scale_op(format):
    refuses(ConfigError, format, {}, "global_scale_op is 'times'", "multiply, divide", op="times")


def test_dtypes_ranks_and_types():
    codes, scales, global_scale = parts("nvfp4")
    refuses(
        ConfigError, "nvfp4", {0: codes.to(torch.int8)}, "codes is torch.int8 (2, 3, 32)", "uint8"
    )
    refuses(ConfigError, "nvfp4", {0: codes[0]}, "codes is torch.uint8 (3, 32)", "3 dimensions")
    refuses(ConfigError, "nvfp4", {0: codes.tolist()}, "codes is [[[34,")
    refuses(ConfigError, "nvfp4", {1: scales.float()}, "scales is torch.float32", "uint8")
    refuses(ConfigError, "nvfp4", {1: scales.view(torch.float8_e4m3fn)}, "float8_e4m3fn", "uint8")
    refuses(ConfigError, "nvfp4", {1: None}, "scales is None")
    refuses(ConfigError, "nvfp4", {2: None}, "global_scale is None", "float32", "1 dimensions")
    refuses(ConfigError, "nvfp4", {2: torch.tensor(1.0)}, "global_scale is torch.float32 ()")
    refuses(ConfigError, "nvfp4", {2: global_scale.double()}, "global_scale is torch.float64 (2,)")
    refuses(ConfigError, "bf16", {0: torch.ones(2, 3, 64)}, "codes is torch.float32", "bfloat16")
    refuses(ConfigError, "mxfp4", {1: scales.view(torch.float8_e4m3fn)}, "float8_e4m3fn", "uint8")


def test_shapes():
    codes, scales, _ = parts("nvfp4")
    refuses(ConfigError, "nvfp4", {1: scales[..., :3]}, "(2, 3, 3)", "(2, 3, 4)")
    refuses(ConfigError, "nvfp4", {1: scales[:1]}, "(1, 3, 4)", "(2, 3, 4)")
    refuses(ConfigError, "mxfp4", {1: scales}, "(2, 3, 4)", "(2, 3, 2)")
    refuses(ConfigError, "nvfp4", {2: torch.ones(3)}, "3 values for 2 experts")
    refuses(ConfigError, "nvfp4", {2: torch.ones(1)}, "1 values for 2 experts")
    refuses(ConfigError, "nvfp4", {0: codes[:0]}, "(0, 3, 32)", "no empty dimension")
    refuses(ConfigError, "nvfp4", {0: codes[:, :0]}, "(2, 0, 32)")
    refuses(ConfigError, "nvfp4", {0: codes[..., :0]}, "(2, 3, 0)")


def test_parts_that_a_format_does_not_have():
    _, scales, global_scale = parts("nvfp4")
    refuses(ConfigError, "bf16", {1: scales}, "a bf16 weight has scales", "None")
    refuses(ConfigError, "bf16", {2: global_scale}, "a bf16 weight has a global_scale", "None")
    refuses(ConfigError, "mxfp4", {2: global_scale}, "a mxfp4 weight has a global_scale", "None")


def test_columns_that_do_not_fill_blocks():
    codes, _, _ = parts("nvfp4")
    refuses(
        Unsupported, "nvfp4", {0: codes[..., :12]}, "k is 24 in a nvfp4 weight", "multiple of 16"
    )
    refuses(
        Unsupported, "mxfp4", {0: codes[..., :24]}, "k is 48 in a mxfp4 weight", "multiple of 32"
    )
    bf16 = torch.ones(1, 1, 40, dtype=torch.bfloat16)
    refuses(Unsupported, "bf16", {0: bf16}, "k is 40 in a bf16 weight", "multiple of 16")


def test_parts_on_two_devices():
    _, scales, global_scale = parts("nvfp4")
    refuses(ConfigError, "nvfp4", {1: scales.to("meta")}, "scales is on meta", "cpu")
    refuses(ConfigError, "nvfp4", {2: global_scale.to("meta")}, "global_scale is on meta", "cpu")


@pytest.mark.parametrize("byte", [0x7F, 0xFF, 0x80, 0xB8])
def test_e4m3_nan_and_sign_name_the_first_place(byte):
    _, scales, _ = parts("nvfp4")
    scales[1, 2, 3] = 0xFF
    scales[1, 0, 2] = byte
    refuses(ConfigError, "nvfp4", {1: scales}, f"0x{byte:02X} at expert 1, row 0, block 2")


@pytest.mark.parametrize("value", [0.0, -0.0, -1.0, float("nan"), float("inf"), float("-inf")])
def test_global_scales_that_are_not_finite_and_positive(value):
    changed = {2: torch.tensor([1.0, value])}
    refuses(ConfigError, "nvfp4", changed, f"global scale of expert 1 is {value}", "finite, > 0")


def test_e8m0_nan_names_the_place_even_over_zero_codes():
    codes, scales, _ = parts("mxfp4")
    codes[1, 2, 16:] = 0
    scales[1, 2, 1] = 0xFF
    changed = {0: codes, 1: scales}
    refuses(ConfigError, "mxfp4", changed, "0xFF (NaN) at expert 1, row 2, block 1", "0 to 254")


@pytest.mark.parametrize("byte", [0, 1, 254])
def test_e8m0_bytes_at_the_ends_are_legal(byte):
    codes, scales, _ = parts("mxfp4")
    weight = PackedWeight("mxfp4", codes, torch.full_like(scales, byte))
    assert exponent_range(weight)[1].tolist() == [byte - 127] * 2


def test_exponents_may_span_96_binades_and_no_more():
    codes, scales, _ = parts("mxfp4")
    scales[1, 0, 0], scales[1, 2, 1] = 56, 152
    assert PackedWeight("mxfp4", codes, scales).rows == 3
    scales[1, 2, 1] = 153
    words = ("block exponents of expert 1 span 97 binades", "allowed: 96")
    refuses(Unsupported, "mxfp4", {1: scales}, *words)
    codes[1, 2, 16:] = 0x80  # -0 and +0: this block no longer counts
    assert PackedWeight("mxfp4", codes, scales).rows == 3
    # Two experts far apart are no span.
    wide = torch.full_like(scales, 0)
    wide[1] = 254
    assert exponent_range(PackedWeight("mxfp4", parts("mxfp4")[0], wide))[0].tolist() == [-127, 127]


@pytest.mark.parametrize("format", ["nvfp4", "bf16"])
def test_only_mxfp4_has_an_exponent_range(format):
    with pytest.raises(ConfigError, match=f"format is '{format}'; allowed: mxfp4"):
        exponent_range(PackedWeight(format, *parts(format)))


def test_a_packed_weight_is_frozen():
    weight = PackedWeight("nvfp4", *parts("nvfp4"))
    with pytest.raises(AttributeError):
        weight.format = "mxfp4"
    assert weight != PackedWeight("nvfp4", *parts("nvfp4")), "compared by identity, not by value"
    assert apply_global_scale(weight, 1, torch.tensor(2.0)) == 2.0
