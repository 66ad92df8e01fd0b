"""Fragment order: what a lane's words hold, and the exact way back."""

import pytest
import torch

from exactmoe.errors import Unsupported
from exactmoe.formats import PackedWeight, exponent_range, quantize
from exactmoe.formats.fragment import (
    from_fragment,
    largest_exponents,
    to_canonical,
    to_fragment,
    unsupported,
)

EXPERTS, ROWS, COLUMNS = 3, 256, 384
PAIR = 0x81C081C0


def weight(format, scales=None):
    generator = torch.Generator().manual_seed(7)
    shape = (EXPERTS, ROWS, COLUMNS // 2)
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    block, low, high = (16, 0, 127) if format == "nvfp4" else (32, 90, 180)
    if scales is None:
        shape = (EXPERTS, ROWS, COLUMNS // block)
        scales = torch.randint(low, high, shape, dtype=torch.uint8, generator=generator)
    return PackedWeight(format, codes, scales, torch.ones(EXPERTS) if format == "nvfp4" else None)


def copy_of(w):
    scale = None if w.global_scale is None else w.global_scale.clone()
    return PackedWeight(w.format, w.codes.clone(), w.scales.clone(), scale)


def unpacked(word):
    """What kernels/cuda/unpack.cuh makes of a word: four pairs of codes, low half first."""
    rotated = (word >> 4) | (word << 28)
    pairs = [
        (word << 6) & PAIR,
        (word << 2) & PAIR,
        rotated & PAIR,
        (word & 0x81808180) | ((word >> 8) & 0x00400040),
    ]
    halves = [(pair >> shift) & 0xFFFF for pair in pairs for shift in (0, 16)]
    return [(half >> 15 << 3) | (half >> 6 & 7) for half in halves]


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_a_lane_finds_the_codes_of_its_rows_and_steps(format):
    canonical = weight(format)
    arranged = copy_of(canonical)
    to_fragment(arranged)
    words = arranged.codes.view(torch.int32).view(EXPERTS, ROWS // 128, COLUMNS // 128, 16, 32, 4)
    for place in [
        (0, 0, 0, 0, 0, 0),
        (2, 1, 2, 15, 31, 3),
        (1, 1, 1, 7, 13, 2),
        (0, 1, 0, 3, 6, 1),
    ]:
        expert, panel, chunk, group, lane, number = place
        row, begin = panel * 128 + group * 8 + lane // 4, chunk * 128 + 32 * number + lane % 4 * 2
        k = [begin + offset + half for offset in (0, 8, 16, 24) for half in (0, 1)]
        byte = [int(canonical.codes[expert, row, i // 2]) for i in k]
        codes = [b >> 4 if i % 2 else b & 15 for i, b in zip(k, byte, strict=True)]
        assert unpacked(int(words[place]) & 0xFFFFFFFF) == codes


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_the_way_back_is_exact(format):
    canonical = weight(format)
    arranged = copy_of(canonical)
    to_fragment(arranged)
    assert not torch.equal(arranged.codes, canonical.codes)
    copied = from_fragment(arranged)
    assert torch.equal(copied.codes, canonical.codes)
    assert torch.equal(copied.scales, canonical.scales)
    to_canonical(arranged)
    assert torch.equal(arranged.codes, canonical.codes)
    assert torch.equal(arranged.scales, canonical.scales)


def test_a_scale_byte_is_linear_in_the_bits_of_its_bf16_number():
    """Byte b decodes as bf16 bits 16 b + 0x7600, e4m3 x 2^118; zero's product is 0."""
    scales = torch.arange(127, dtype=torch.uint8).repeat(EXPERTS * ROWS * COLUMNS // 16 // 127 + 1)
    scales = scales[: EXPERTS * ROWS * COLUMNS // 16].view(EXPERTS, ROWS, COLUMNS // 16)
    canonical = weight("nvfp4", scales)
    arranged = copy_of(canonical)
    to_fragment(arranged)
    found = arranged.scales.view(EXPERTS, ROWS // 128, COLUMNS // 128, 128, 8)
    stored = found.transpose(2, 3).reshape(scales.shape).int()
    bits = (stored * 16 + 0x7600).to(torch.int32) & 0xFFFF
    decoded = torch.where(bits >= 0x8000, bits - 0x10000, bits).to(torch.int16)
    numbers = decoded.view(torch.bfloat16).double()
    expected = scales.view(torch.float8_e4m3fn).double() * 2.0**118
    zero = scales == 0
    assert torch.equal(numbers[~zero], expected[~zero])
    # The smallest bf16 number is 2^-133; the largest code is 6 x 2^-126.
    assert float((numbers[zero].abs() * 6 * 2.0**-126).max()) < 2.0**-134


def test_zero_blocks_keep_every_scale_byte():
    canonical = weight("mxfp4")
    canonical.codes[:, :, :16] = 0x80  # zeros of both signs
    canonical.scales[:, :, 0] = torch.arange(EXPERTS * ROWS).remainder(255).view(EXPERTS, ROWS)
    canonical.codes[2] = 0x08  # an expert of zeros
    low, high = exponent_range(canonical)
    arranged = copy_of(canonical)
    to_fragment(arranged)
    assert torch.equal(largest_exponents(arranged), high.int())
    # No block may decode to Inf or NaN: exponent bits n - p + 245, modulo 256, all ones.
    stored = arranged.scales.int() - 127 - high[:, None, None]
    assert not bool(((stored + 245).remainder(256) == 255).any())
    to_canonical(arranged)
    assert torch.equal(arranged.scales, canonical.scales)


@pytest.mark.parametrize("largest", [0, 100, 244, 245, 246, 250, 254])
def test_zero_blocks_beside_every_largest_exponent(largest):
    scales = torch.full((EXPERTS, ROWS, COLUMNS // 32), largest, dtype=torch.uint8)
    scales[:, :, 0] = torch.arange(255, dtype=torch.uint8).repeat(4)[: EXPERTS * ROWS].view(3, -1)
    canonical = weight("mxfp4", torch.full_like(scales, largest))
    canonical.codes[:, :, :16] = 0
    canonical.scales.copy_(scales)
    arranged = copy_of(canonical)
    to_fragment(arranged)
    exponents = arranged.scales.int() - largest + 245
    assert not bool((exponents.remainder(256) == 255).any())
    to_canonical(arranged)
    assert torch.equal(arranged.scales, canonical.scales)


def test_other_formats_and_sizes_are_refused():
    plain = PackedWeight("bf16", torch.zeros(1, 128, 128, dtype=torch.bfloat16))
    assert "format is bf16" in unsupported(plain)
    narrow = quantize(torch.ones(1, 128, 64), "nvfp4")
    assert "128 and 64" in unsupported(narrow)
    with pytest.raises(Unsupported, match="multiples of 128"):
        to_fragment(narrow)


def test_views_of_stacked_projections_are_arranged_where_they_lie():
    """hf keeps gate and up of an expert in one tensor."""
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 256, (2, 512, 64), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 127, (2, 512, 8), dtype=torch.uint8, generator=generator)
    before, before_scales = codes.clone(), scales.clone()
    gate, up = (
        PackedWeight("nvfp4", codes[:, part], scales[:, part], torch.ones(2))
        for part in (slice(0, 256), slice(256, 512))
    )
    to_fragment(up)
    assert torch.equal(codes[:, :256], before[:, :256])
    alone = PackedWeight(
        "nvfp4", before[:, 256:].clone(), before_scales[:, 256:].clone(), torch.ones(2)
    )
    to_fragment(alone)
    assert torch.equal(up.codes, alone.codes)
    assert torch.equal(up.scales, alone.scales)
    to_fragment(gate)
    to_canonical(gate)
    to_canonical(up)
    assert torch.equal(codes, before)
    assert torch.equal(scales, before_scales)
