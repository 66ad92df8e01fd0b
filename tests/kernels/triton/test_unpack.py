"""Operands of the matrix units: every code with every block scale, by bytes."""

import pytest
import torch
from torch import Tensor

import matrix_kernels as kernels
from exactmoe.formats import e2m1
from exactmoe.formats.scales import decode_e4m3
from layers import assert_same_bits
from triton_device import DEVICE, jit

BYTES = torch.arange(256, dtype=torch.uint8)
CODES = e2m1.decode(e2m1.unpack(BYTES)).double()  # 512 columns: low nibble first


def operands(scales: Tensor, exponents: Tensor, format: str, block: int) -> Tensor:
    """bfloat16 [M, 512]: all 256 bytes in each row, whose blocks all have one scale byte."""
    programs = -(-len(scales) // 16)
    y = torch.full((16 * programs, 512), 7, dtype=torch.int16, device=DEVICE)
    wide = torch.zeros(16 * programs, 512 // block, dtype=torch.uint8)
    wide[: len(scales)] = scales[:, None]
    largest = torch.zeros(16 * programs, dtype=torch.int32)
    largest[: len(scales)] = exponents
    codes = BYTES.expand(16 * programs, 256).contiguous().to(DEVICE)
    constants = {"FORMAT": format, "BLOCK": block, "COLUMNS": 512}
    jit(kernels.fp4)[(programs,)](codes, wide.to(DEVICE), largest.to(DEVICE), y, **constants)
    return y[: len(scales)].cpu().view(torch.bfloat16)


def test_nvfp4_is_code_times_scale_over_256():
    scales = torch.arange(0x7F, dtype=torch.uint8)
    found = operands(scales, torch.zeros(0x7F), "nvfp4", 16)
    expected = CODES * decode_e4m3(scales).double()[:, None] / 256
    assert_same_bits(found, expected.bfloat16())
    assert_same_bits(found.double(), expected)  # nothing was rounded


@pytest.mark.parametrize("largest", [0, 97, 127, 254])
def test_mxfp4_is_code_times_a_power_down_to_96_binades(largest):
    scales = torch.arange(max(largest - 96, 0), largest + 1).to(torch.uint8)
    found = operands(scales, torch.full((len(scales),), largest), "mxfp4", 32)
    powers = torch.ldexp(torch.ones(len(scales)).double(), scales.long() - largest)
    assert_same_bits(found.double(), CODES * powers[:, None])


def test_mxfp4_zeros_stay_zeros_beside_any_exponent():
    """Every scale byte against p = -127, 0 and 127."""
    scales = torch.arange(255, dtype=torch.uint8)
    for largest in (0, 127, 254):
        found = operands(scales, torch.full((255,), largest), "mxfp4", 32)
        assert bool((found[:, CODES == 0] == 0).all())


@pytest.mark.parametrize("nan", [False, True])
def test_e4m3(nan):
    y = torch.full((256,), 7, dtype=torch.int16, device=DEVICE)
    jit(kernels.e4m3)[(1,)](BYTES.to(DEVICE), y, NAN=nan, COUNT=256)
    found, expected = y.cpu().view(torch.bfloat16), decode_e4m3(BYTES).bfloat16()
    number = ~expected.isnan()
    assert_same_bits(found[number], expected[number])
    assert bool(found[~number].isnan().all()) == nan
