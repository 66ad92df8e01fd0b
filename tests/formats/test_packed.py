"""What a PackedWeight's bytes mean: operand x epilogue, and dequantize, against ml_dtypes and exact
rational arithmetic (contract section 2; field faults A1, A4, A6)."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.compressors import NVFP4PackedCompressor
from compressed_tensors.quantization import preset_name_to_scheme

from chains import nearest_f32
from exactmoe.errors import ConfigError
from exactmoe.formats import (
    PackedWeight,
    apply_global_scale,
    dequantize,
    exponent_range,
    operand,
    quantize_nvfp4,
)

CODES = np.arange(16, dtype=np.uint8)
CODE_VALUES = CODES.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
PACKED_16 = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], dtype=torch.uint8)
PACKED_32 = PACKED_16.repeat(2)


def u8(values):
    return torch.tensor(values, dtype=torch.uint8)


def same(ours, expected):
    """Equal bytes; `expected` is a numpy array of the same type."""
    ours = ours.contiguous().numpy()
    return ours.dtype == expected.dtype and ours.tobytes() == expected.tobytes()


def to_f32(values):
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def nvfp4(codes, scales, global_scale, op="multiply"):
    return PackedWeight("nvfp4", codes, scales, torch.tensor(global_scale), op)


@pytest.mark.parametrize("global_scale", [1.0, 2.0**-9, 3.85e-5, 4.83e-5, 3e33, 1e-40])
def test_nvfp4_every_code_under_every_legal_scale(global_scale):
    legal = np.arange(0x7F, dtype=np.uint8)
    scale_values = legal.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    weight = nvfp4(PACKED_16.expand(1, 127, 8), u8(legal.tolist()).view(1, 127, 1), [global_scale])
    product = CODE_VALUES * scale_values[:, None]
    exact = product * np.float64(np.float32(global_scale))  # 2 + 4 + 24 bits: exact in float64

    values = operand(weight, 0)
    assert same(values, to_f32(product))
    assert same(values.bfloat16().float(), to_f32(product)), "every operand is exactly a bf16"
    assert same(apply_global_scale(weight, 0, values), to_f32(exact))
    assert same(dequantize(weight)[0], exact)


@pytest.mark.parametrize("byte", [0x7F, *range(0x80, 0x100)])
def test_nvfp4_the_other_scale_bytes_are_refused(byte):
    with pytest.raises(ConfigError, match=f"0x{byte:02X} at expert 0, row 0, block 0"):
        nvfp4(PACKED_16.view(1, 1, 8), u8([[[byte]]]), [1.0])


def test_mxfp4_every_code_under_every_legal_scale():
    # One expert per byte, so that p, the largest exponent of the expert, is the byte's own.
    weight = PackedWeight("mxfp4", PACKED_32.expand(255, 1, 16), u8(range(255)).view(255, 1, 1))
    scales = np.arange(255, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    exact = np.tile(CODE_VALUES, 2) * scales[:, None, None]
    assert same(dequantize(weight), exact)
    for byte in range(255):
        values = operand(weight, byte)
        assert same(values, to_f32(np.tile(CODE_VALUES, 2)[None]))
        # 2 x 2^127 and more are Inf in float32: one rounding of the true value.
        assert same(apply_global_scale(weight, byte, values), to_f32(exact[byte]))


@pytest.mark.parametrize("span", [1, 13, 96])
def test_mxfp4_operands_are_relative_to_the_largest_block(span):
    low = torch.arange(255 - span)
    scales = torch.stack((low, low + span), -1).to(torch.uint8)[:, None]
    experts = scales.shape[0]
    weight = PackedWeight("mxfp4", PACKED_32.repeat(2).expand(experts, 1, 32), scales)
    codes = np.tile(CODE_VALUES, 4)
    relative = codes * np.repeat([2.0**-span, 1.0], 32)
    smallest, largest = exponent_range(weight)
    assert smallest.tolist() == (low - 127).tolist()
    assert largest.tolist() == (low - 127 + span).tolist()
    for expert in range(0, experts, 7):
        values = operand(weight, expert)
        assert same(values, to_f32(relative[None]))
        assert same(values.bfloat16().float(), to_f32(relative[None]))
        exact = relative[None] * 2.0 ** (int(low[expert]) - 127 + span)
        assert same(apply_global_scale(weight, expert, values), to_f32(exact))
        assert same(dequantize(weight)[expert], exact)


def test_mxfp4_exponents_of_zero_blocks_do_not_count():
    codes = torch.cat((u8([0x80] * 16), PACKED_32, u8([0x08] * 16))).view(1, 1, 48)
    weight = PackedWeight("mxfp4", codes, u8([[[254, 100, 0]]]))
    assert [int(v) for v in exponent_range(weight)] == [-27, -27]
    expected = np.concatenate(([0.0, -0.0] * 16, np.tile(CODE_VALUES, 2), [-0.0, 0.0] * 16))
    assert same(operand(weight, 0)[0], to_f32(expected)), "no 0 x Inf, and the signs of zeros stay"
    assert same(dequantize(weight)[0, 0], expected * 2.0**-27)


def test_mxfp4_expert_of_zeros_has_exponent_zero():
    weight = PackedWeight("mxfp4", u8([0x80] * 16).view(1, 1, 16), u8([[[254]]]))
    assert [int(v) for v in exponent_range(weight)] == [0, 0]
    assert same(apply_global_scale(weight, 0, torch.tensor([3.0])), np.float32([3.0]))


def test_low_nibble_is_the_even_column():
    weight = nvfp4(u8([[[0x71] * 8]]), u8([[[0x38]]]), [1.0])  # 0x38 is 1.0
    assert operand(weight, 0).tolist() == [[0.5, 6.0] * 8]
    assert dequantize(weight).tolist() == [[[0.5, 6.0] * 8]]


def test_rows_blocks_and_experts_are_row_major():
    # Every byte differs, so that no transposition can pass.
    codes = u8([17 * ((i * 7 + 1) % 16) for i in range(2 * 3 * 16)]).view(2, 3, 16)
    scales = u8(range(0x20, 0x20 + 12)).view(2, 3, 2)
    weight = nvfp4(codes, scales, [2.0, 0.25])
    scale_values = scales.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    for expert, row, column in np.ndindex(2, 3, 32):
        code = CODE_VALUES[int(codes[expert, row, column // 2]) >> (4 * (column % 2)) & 15]
        value = code * scale_values[expert, row, column // 16]
        assert float(operand(weight, expert)[row, column]) == value
        assert float(dequantize(weight)[expert, row, column]) == value * [2.0, 0.25][expert]


def test_gate_and_up_keep_their_own_global_scales():
    """Field fault A1: the same bytes under 2^-9 and 2^-6, swapped in half of the experts."""
    codes = u8([(i * 37 + 11) % 256 for i in range(4 * 32 * 32)]).view(4, 32, 32)
    scales = u8([i % 0x7F for i in range(4 * 32 * 4)]).view(4, 32, 4)
    gate = nvfp4(codes, scales, [2.0**-9, 2.0**-9, 2.0**-6, 2.0**-6])
    up = nvfp4(codes, scales, [2.0**-6, 2.0**-6, 2.0**-9, 2.0**-9])
    ratio = torch.tensor([8.0, 8.0, 0.125, 0.125], dtype=torch.float64)[:, None, None]
    assert torch.equal(dequantize(up), dequantize(gate) * ratio)
    accumulator = torch.linspace(-3, 3, 64)
    for expert in range(4):
        ours = apply_global_scale(up, expert, accumulator)
        other = apply_global_scale(gate, expert, accumulator)
        assert torch.equal(ours, other * float(ratio[expert]))


@pytest.mark.parametrize("op", ["multiply", "divide"])
def test_global_scale_takes_one_rounding(op, rng):
    accumulator = torch.randn(400, generator=rng) * 2.0 ** torch.randint(
        -140, 100, (400,), generator=rng
    )
    scales = [3.85e-5, 1 / 3, 2687.0, 2.0**-10, 1e-30, 1e-42, 3e38]
    weight = nvfp4(PACKED_16.expand(7, 1, 8), u8([0x38] * 7).view(7, 1, 1), scales, op)
    two_roundings = 0
    for expert, scale in enumerate(weight.global_scale.tolist()):
        ours = apply_global_scale(weight, expert, accumulator)
        factor = Fraction(scale) if op == "multiply" else 1 / Fraction(scale)
        expected = [nearest_f32(Fraction(value) * factor) for value in accumulator.tolist()]
        expected = np.copysign(np.float32(expected), accumulator.numpy())
        assert same(ours, expected)
        reciprocal = accumulator * (1 / weight.global_scale[expert])
        two_roundings += int((reciprocal != ours).sum())
    assert op == "multiply" or two_roundings > 300, "these inputs would show a stored reciprocal"


def test_dequantize_divides_once_in_float64():
    codes = PACKED_16.expand(1, 127, 8)
    weight = nvfp4(codes, u8(range(127)).view(1, 127, 1), [2687.0], "divide")
    scales = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    exact = [[float(Fraction(v * s) / 2687) for v in CODE_VALUES] for s in scales]
    assert same(dequantize(weight)[0], np.copysign(exact, CODE_VALUES))


def test_bf16_weights_pass_through():
    values = torch.arange(2 * 3 * 16).view(2, 3, 16).bfloat16() * -0.37
    weight = PackedWeight("bf16", values)
    assert (weight.num_experts, weight.rows, weight.columns, weight.nbytes) == (2, 3, 16, 192)
    assert same(operand(weight, 1), values[1].float().numpy())
    assert same(dequantize(weight), values.double().numpy())
    accumulator = torch.tensor([1.5, -0.0])
    assert apply_global_scale(weight, 0, accumulator) is accumulator


def test_views_into_a_fused_tensor_read_their_own_half():
    """Gate and up as views of one [E, 2N, ...] tensor: nothing is copied, and no half leaks."""
    fused = u8([(i * 29 + 5) % 256 for i in range(2 * 4 * 16)]).view(2, 4, 16)
    scales = u8(range(100, 108)).view(2, 4, 1)
    for half in (slice(0, 2), slice(2, 4)):
        view = PackedWeight("mxfp4", fused[:, half], scales[:, half])
        copy = PackedWeight("mxfp4", fused[:, half].clone(), scales[:, half].clone())
        assert view.codes.untyped_storage().data_ptr() == fused.untyped_storage().data_ptr()
        assert torch.equal(dequantize(view), dequantize(copy))
        assert torch.equal(operand(view, 1), operand(copy, 1))
        assert exponent_range(view)[1].tolist() == exponent_range(copy)[1].tolist()


def test_sizes_and_bytes_are_reported():
    weight = nvfp4(PACKED_16.expand(3, 5, 8), u8([1] * 15).view(3, 5, 1), [1.0] * 3)
    assert (weight.num_experts, weight.rows, weight.columns) == (3, 5, 16)
    assert weight.nbytes == 3 * 5 * 8 + 15 + 12
    assert weight.device == torch.device("cpu")


def test_meta_tensors_are_checked_for_shape_only():
    meta = torch.empty(2, 3, 16, dtype=torch.uint8, device="meta")
    weight = PackedWeight("mxfp4", meta, torch.empty(2, 3, 1, dtype=torch.uint8, device="meta"))
    assert (weight.num_experts, weight.rows, weight.columns) == (2, 3, 32)


SCHEME = preset_name_to_scheme("NVFP4A16", ["Linear"])


def test_compressed_tensors_reads_the_same_values_from_the_same_bytes(rng):
    packed = torch.randint(0, 256, (32, 32), generator=rng, dtype=torch.uint8)
    scales = torch.randint(0, 0x7F, (32, 4), generator=rng, dtype=torch.uint8)
    state = {
        "weight_packed": packed,
        "weight_scale": scales.view(torch.float8_e4m3fn),
        "weight_global_scale": torch.tensor([1024.0]),
    }
    theirs = NVFP4PackedCompressor.decompress(state, SCHEME)["weight"]
    ours = dequantize(nvfp4(packed[None], scales[None], [1024.0], "divide"))[0]
    assert theirs.dtype == torch.bfloat16
    assert same(theirs.double(), ours.numpy()), "a power of two keeps all of it exact in bf16"


def test_compressed_tensors_packs_the_same_codes(rng):
    weights = torch.randn(16, 64, generator=rng)
    weights[0, 0] = 2688.0 / 64  # amax: the global scale becomes exactly 1 / 64
    ours = quantize_nvfp4(weights[None])
    assert ours.global_scale.tolist() == [1 / 64]
    state = {
        "weight": weights,
        "weight_scale": ours.scales[0].view(torch.float8_e4m3fn).float(),
        "weight_global_scale": torch.tensor([64.0]),
    }
    theirs = NVFP4PackedCompressor.compress(state, SCHEME)
    assert torch.equal(theirs["weight_packed"], ours.codes[0])
    assert torch.equal(theirs["weight_scale"].view(torch.uint8), ours.scales[0])
