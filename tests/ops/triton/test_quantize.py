"""quantize on the card's path: the reference's codes and scales, byte for byte."""

import pytest
import torch
from torch import Tensor

from exactmoe.formats.rows import Rows
from exactmoe.ops.triton.quantize import quantize
from exactmoe.reference.quantize import quantize as reference_quantize
from layers import assert_same_bits
from triton_device import DEVICE


def compare(values: Tensor) -> tuple[Tensor, Tensor]:
    out = Rows(
        torch.zeros(values.shape, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn),
        torch.full((values.shape[0], values.shape[1] // 128), 7.0, device=DEVICE),
    )
    assert quantize(values.to(DEVICE), out) is out
    codes, scales = reference_quantize(values)
    assert out.scales is not None
    assert_same_bits(out.values.view(torch.uint8).cpu(), codes)
    assert_same_bits(out.scales.cpu(), scales)
    return codes, scales


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0, 128), (1, 128), (9, 384)])
def test_same_bytes_as_the_reference(kind, shape, rng):
    sizes = torch.tensor([1e-42, 1e-6, 1.0, 1e4, 1e37, 1.0, 1.0, 1.0, 0.0])[: shape[0], None]
    compare((torch.randn(shape, generator=rng) * sizes).to(kind))


def test_every_exponent_and_every_half_way_point():
    """All e4m3 neighbours with the points half way between them and beside those, times 2^n."""
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    half = (codes[1:] + codes[:-1]) / 2
    points = torch.cat([codes, half, half.nextafter(half + 1), half.nextafter(half - 1)])
    points = torch.nn.functional.pad(points, (0, -len(points) % 127)).view(-1, 127)
    points = torch.nn.functional.pad(points, (1, 0), value=448.0)  # keeps the scale
    rows = torch.cat([points, -points])
    for exponent in (-22, -1, 0, 13, 119):
        codes, _ = compare(rows * 2.0**exponent)
        assert len(set(codes.flatten().tolist())) == 2 * 0x7F - 1


def test_the_scale_steps_where_amax_does():
    """amax at and beside 448 x 2^n and the floor of 1e-4."""
    edges = torch.tensor([448.0 * 2.0**n for n in (-30, -22, -3, 0, 1, 100, 119)] + [1e-4, 4.48e-2])
    ends = torch.full_like(edges, float("inf"))
    rows = torch.cat([edges, edges.nextafter(ends), edges.nextafter(-ends)])
    compare(torch.nn.functional.pad(rows[:, None], (0, 127), value=1e-3))
    compare(torch.nn.functional.pad(rows[:, None], (0, 127)))


@pytest.mark.parametrize("wrong", [float("nan"), -float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_a_group_with_nan_or_inf(wrong, kind, rng):
    values = torch.randn(4, 256, generator=rng).to(kind)
    values[1, 130] = wrong
    codes, scales = compare(values)
    assert codes[1, 128:].tolist() == [0x7F] * 128
    assert scales[1, 1] == 1.0


def test_zeros_have_no_sign():
    codes, scales = compare(torch.tensor([0.0, -0.0, 1e-12, -1e-12] * 32)[None])
    assert codes.unique().tolist() == [0]
    assert scales.tolist() == [[2.0**-22]]


def test_random_bits(rng):
    """Each group within one binade of random bits; every class of float32."""
    bits = torch.randint(0, 2**32, (64, 512), generator=rng, dtype=torch.int64)
    values = bits.to(torch.int32).view(torch.float32)
    compare(values)
    top = torch.randint(0, 255, (64, 4, 1), generator=rng)
    near = ((top - torch.randint(0, 12, (64, 4, 128), generator=rng)).clamp(min=0) << 23).int()
    compare(((bits.int() & 0x807FFFFF).view(64, 4, 128) | near).view(64, 512).view(torch.float32))
