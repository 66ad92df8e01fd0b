"""dense_linear on the card's path: the reference's bytes where sums are exact, groups, segments."""

import pytest
import torch

from exactmoe import reference
from exactmoe.formats import PackedWeight
from exactmoe.ops.triton import dense_linear
from exactmoe.ops.triton.launch import architecture
from exactmoe.ops.triton.prepare import prepare
from exactmoe.plan.tiles import Tile
from layers import assert_same_bits
from triton_device import DEVICE
from triton_experts import FORMATS, SENTINEL, TILE, exact_weight, on_device


def run(x, weight, tile=TILE, dtype=torch.float32):
    """x bfloat16 [T, G, K] -> [T, G, N] of the Triton path, into a part of a larger one."""
    tokens, groups, _ = x.shape
    shape = (tokens, groups, weight.rows + 3)
    wide = torch.full(shape, SENTINEL, dtype=dtype, device=DEVICE)
    out = wide[..., : weight.rows]
    prepared = prepare(on_device(weight))
    dense_linear.launch(x.to(DEVICE), prepared, out, tile, architecture(out.device)).run()
    assert bool((wide[..., weight.rows :] == SENTINEL).all())
    return out.cpu()


def integers(rng, *shape):
    return torch.randint(-2, 3, shape, generator=rng).bfloat16()


def compare(x, weight, tile=TILE):
    """float32, and bfloat16 that is rounded once."""
    expected = reference.dense_linear(x, weight)
    assert_same_bits(run(x, weight, tile) + 0.0, expected)
    rounded = reference.finish(expected, None, "bf16")
    assert_same_bits(run(x, weight, tile, torch.bfloat16), rounded)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("format", FORMATS)
def test_formats_and_groups(format, groups, rng):
    compare(integers(rng, 5, groups, 160), exact_weight(rng, format, groups, 80, 160))


@pytest.mark.parametrize("tokens", [1, 16, 17, 70])
def test_widths(tokens, rng):
    compare(integers(rng, tokens, 2, 288), exact_weight(rng, "fp8", 2, 144, 288))


def test_strided_rows(rng):
    """Groups that do not lie side by side, as slices of a wider tensor."""
    x = integers(rng, 4, 2, 400)[..., 16:304]
    weight = exact_weight(rng, "fp8", 2, 80, 288)
    assert_same_bits(run(x, weight) + 0.0, reference.dense_linear(x.contiguous(), weight))


def test_segments(rng):
    """k = 4096 + 16 in FP8: the second segment is one short step, from +0."""
    x = torch.zeros(2, 2, 4112)
    x[..., 4000:] = torch.randint(-2, 3, (2, 2, 112), generator=rng).float()
    compare(x.bfloat16(), exact_weight(rng, "fp8", 2, 32, 4112))


def test_no_tokens(rng):
    assert run(integers(rng, 0, 2, 96), exact_weight(rng, "fp8", 2, 32, 96)).shape == (0, 2, 32)


def test_groups_count_as_programs():
    """8 groups of 1024 rows fill a card with tiles that one group of 1024 rows would halve."""
    meta = {"dtype": torch.bfloat16, "device": "meta"}
    tile = Tile(16, 32, 64, 128, 4, 4)
    for groups, grid in ((1, (128 // 4,)), (8, (16, 8))):
        weight = prepare(PackedWeight("bf16", torch.empty(groups, 1024, 4096, **meta)))
        x = torch.empty(1, groups, 4096, **meta)
        out = torch.empty(1, groups, 1024, device="meta")
        assert dense_linear.launch(x, weight, out, tile, "sm_90").grid == grid


def test_nan_and_minus_zero():
    """One NaN for all; a negative sum that a factor takes below float32 is +0, as in `finish`."""
    codes = torch.zeros(1, 2, 8, dtype=torch.uint8)
    codes[0, 0, 0], codes[0, 1, 0] = 0x0A, 0x02  # -1, 1
    scales = torch.full((1, 2, 1), 0x38, dtype=torch.uint8)
    weight = PackedWeight("nvfp4", codes, scales, torch.tensor([2.0**-100]))
    x = torch.zeros(3, 1, 16)
    x[0, 0, 0], x[1, 0, 0], x[2, 0, 0] = 2.0**-60, float("nan"), 2.0**90
    found = run(x.bfloat16(), weight, dtype=torch.bfloat16).view(torch.int16)[:, 0]
    assert found[0].tolist() == [0, 0]
    assert found[1].tolist() == [0x7FC0] * 2
    assert (
        found[2].tolist()
        == torch.tensor([-(2.0**-10), 2.0**-10]).bfloat16().view(torch.int16).tolist()
    )
