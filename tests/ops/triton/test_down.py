"""down on the card's path: the reference's bytes where sums are exact, small errors elsewhere."""

from dataclasses import replace

import pytest
import torch

from exactmoe.config import Numerics
from exactmoe.formats import PackedWeight
from exactmoe.formats.rows import Rows
from exactmoe.plan.tiles import Tile
from layers import assert_same_bits
from paths import random_weight
from triton_experts import (
    FORMATS,
    SENTINEL,
    TILE,
    Experts,
    exact_rows,
    exact_weight,
    reference_rows,
    typed,
)

BF16, F32 = Numerics(slot="bf16"), Numerics(slot="f32")
# (H, I): rows and k.
SIZES = [(72, 2880), (64, 704), (96, 160), (32, 32), (144, 640)]


def call(rng, format, sizes, tokens=5, top_k=2, scaled=False, experts=3) -> Experts:
    hidden, inner = sizes
    return Experts(
        weights=(exact_weight(rng, format, experts, hidden, inner),),
        rows=exact_rows(rng, tokens * top_k, inner, scaled),
        expert_ids=torch.randint(-1, experts + 1, (tokens, top_k), generator=rng).int(),
    )


def compare(case: Experts, numerics: Numerics = F32, tile: Tile = TILE) -> torch.Tensor:
    rounded = numerics.slot == "bf16"
    found, expected = case.down(rounded, tile), case.down_reference(numerics)
    assert_same_bits(found, typed(expected, found))
    assert bool((expected != SENTINEL).any())
    return found


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sizes(sizes, rng):
    compare(call(rng, "mxfp4", sizes), BF16)


@pytest.mark.parametrize("format", FORMATS)
def test_formats(format, rng):
    compare(call(rng, format, (80, 160)))


@pytest.mark.parametrize("format", ["nvfp4", "nvfp4-divide", "mxfp4", "bf16"])
def test_chains_of_128(format, rng):
    compare(call(rng, format, (80, 384), scaled=True))


@pytest.mark.parametrize("tokens", [32, 64, 128])
def test_every_token_width(tokens, rng):
    compare(call(rng, "mxfp4", (40, 128), tokens=23, top_k=3), tile=replace(TILE, tokens=tokens))


def test_rows_that_fill_half_of_the_matrix(rng):
    compare(call(rng, "bf16", (72, 96)), tile=replace(TILE, rows=32))


def test_no_tokens(rng):
    assert call(rng, "nvfp4", (64, 32), tokens=0).down(rounded=True).shape == (0, 64)


def test_a_chain_ends_at_128():
    """2^24, then two chains' worth of 1 + 1: added one by one to 2^24 they would vanish."""
    weight = torch.zeros(1, 1, 256)
    weight[0, 0, [0, 128, 160]] = 1.0
    rows = torch.zeros(1, 256)
    rows[0, [0, 128, 160]] = torch.tensor([256.0, 1.0, 1.0])
    scales = torch.tensor([[2.0**16, 1.0]])
    case = Experts(
        (PackedWeight("bf16", weight.bfloat16()),), Rows(rows, scales), torch.zeros(1, 1).int()
    )
    assert compare(case).item() == 2.0**24 + 2


def test_fp8_blocks_scale_their_own_rows_and_columns(rng):
    """Scales that no float32 product repeats, in every block; the last blocks are cut."""
    case = call(rng, "fp8", (200, 272))
    assert case.weights[0].scales.unique().numel() == 3 * 2 * 3
    compare(case)


@pytest.mark.parametrize("power", [-127, -1, 100])
def test_mxfp4_zeros_with_any_exponent(power, rng):
    """Blocks of zeros far above p and far below it give zeros; p itself may be anything."""
    case = call(rng, "mxfp4", (64, 128))
    (weight,) = case.weights
    scales = torch.full_like(weight.scales, 127 + power)
    codes = weight.codes.clone()
    codes[..., :16] &= 0x88  # blocks of +0 and -0
    codes[..., 16:32] &= 0x88
    scales[..., 0], scales[..., 1] = 254, 0
    found = compare(replace(case, weights=(replace(weight, codes=codes, scales=scales),)))
    assert bool(torch.isfinite(found).all())


@pytest.mark.parametrize("numerics", [BF16, F32], ids=lambda numerics: numerics.slot)
def test_inf_minus_inf_is_the_one_nan(numerics, rng):
    """A processor's own NaN has its sign set."""
    case = call(rng, "nvfp4", (64, 64))
    case.rows.values[::2, 3:5] = float("inf")
    found = compare(case, numerics)
    assert bool(found.isnan().any()) and bool(found.isinf().any())


@pytest.mark.parametrize("scaled", [False, True])
def test_random_data(scaled, rng):
    weight = random_weight(rng, "nvfp4", 2, 64, 384)
    rows = reference_rows(torch.randn(16, 384, generator=rng), scaled)
    case = Experts((weight,), rows, torch.randint(0, 2, (16, 1), generator=rng).int())
    found, expected = case.down(rounded=False).double(), case.down_reference(F32).double()
    assert float((found - expected).norm() / expected.norm()) < 2.0**-17
