"""gate_up on the card's path: the reference's bytes where sums are exact, else small errors."""

from dataclasses import replace

import pytest
import torch

from exactmoe.errors import Unsupported
from exactmoe.formats import PackedWeight
from exactmoe.formats.rows import Rows
from exactmoe.plan.tiles import Tile
from layers import assert_same_bits
from paths import random_weight
from triton_experts import FORMATS, SENTINEL, TILE, Experts, exact_rows, exact_weight, typed

# (H, I): k and rows beside every tile's edge; the field's sizes, some with fewer rows.
SIZES = [(2880, 72), (1600, 64), (96, 160), (32, 32), (640, 48)]
LIMIT = 0.75
NAN = float("nan")


def call(rng, format, sizes, tokens=5, top_k=2, scaled=False, experts=3) -> Experts:
    hidden, inner = sizes
    return Experts(
        weights=tuple(exact_weight(rng, format, experts, inner, hidden) for _ in range(2)),
        rows=exact_rows(rng, tokens, hidden, scaled),
        expert_ids=torch.randint(-1, experts + 1, (tokens, top_k), generator=rng).int(),
        routing_weights=torch.randn(tokens, top_k, generator=rng) if scaled else None,
        limit=LIMIT,
    )


def compare(case: Experts, tile: Tile = TILE) -> torch.Tensor:
    """In one launch and in two."""
    found, expected = case.gate_up(tile), case.gate_up_reference()
    assert_same_bits(found, typed(expected, found))
    assert_same_bits(case.gate_up(tile, launches=2), found)
    assert bool((expected != SENTINEL).any())
    return expected


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sizes(sizes, rng):
    compare(call(rng, "mxfp4", sizes))


@pytest.mark.parametrize("format", FORMATS)
def test_formats(format, rng):
    expected = compare(call(rng, format, (160, 48)))
    assert bool((expected.abs() > LIMIT**2 / 2).any())  # the clamps bite, and not everywhere
    assert len(expected.unique()) > 100


@pytest.mark.parametrize("format", ["nvfp4", "nvfp4-divide", "mxfp4", "bf16"])
def test_chains_of_128_and_routing_weights(format, rng):
    compare(call(rng, format, (384, 48), scaled=True))


def test_no_limit(rng):
    compare(replace(call(rng, "nvfp4", (96, 48)), limit=None))


@pytest.mark.parametrize("tokens", [16, 32, 64, 128])
@pytest.mark.parametrize("scaled", [False, True])
def test_every_token_width(tokens, scaled, rng):
    tile = replace(TILE, tokens=tokens, rows=32)
    compare(call(rng, "mxfp4", (128, 40), tokens=19, top_k=3, scaled=scaled), tile)


@pytest.mark.parametrize("rows", [16, 64, 128])
def test_every_height_of_a_block(rows, rng):
    compare(call(rng, "bf16", (96, 72)), replace(TILE, rows=rows))


def test_one_expert_serves_more_than_a_tile_others_none(rng):
    case = call(rng, "nvfp4", (64, 32), tokens=40, top_k=1, experts=5)
    ids = torch.tensor([3] * 33 + [1] * 5 + [-1, 9], dtype=torch.int32)[:, None]
    compare(replace(case, expert_ids=ids))


def test_a_token_that_names_an_expert_twice(rng):
    case = call(rng, "nvfp4", (64, 32), tokens=3)
    ids = torch.tensor([[2, 2], [0, 0], [2, 0]], dtype=torch.int32)
    h = compare(replace(case, expert_ids=ids))
    assert_same_bits(h[0], h[1])


@pytest.mark.parametrize("launches", [1, 2])
def test_nobody_is_served(launches, rng):
    case = replace(call(rng, "nvfp4", (64, 32)), expert_ids=torch.full((5, 2), -1).int())
    assert bool((case.gate_up(launches=launches) == SENTINEL).all())


@pytest.mark.parametrize("launches", [1, 2])
def test_no_tokens(launches, rng):
    case = call(rng, "nvfp4", (64, 32), tokens=0)
    assert case.gate_up(launches=launches).shape == (0, 32)


@pytest.mark.parametrize("launches", [1, 2])
@pytest.mark.parametrize("scaled", [False, True])
def test_nan_and_inf_stay_in_their_token(scaled, launches, rng):
    case = call(rng, "mxfp4", (128, 32), tokens=4, scaled=scaled)
    case = replace(case, expert_ids=torch.zeros(4, 2).int())
    clean = case.gate_up(launches=launches)
    values = case.rows.values.clone()
    values[1] = NAN  # what quantize makes of a group with a NaN
    if not scaled:
        values[2, 5] = float("inf")
    dirty = replace(case, rows=Rows(values, case.rows.scales)).gate_up(launches=launches)
    quiet = 0x7FC0 if not scaled else 0x7FC00000
    bits = dirty.view(torch.int16 if not scaled else torch.int32)
    assert bool((bits[2:4] == quiet).all())
    kept = [0, 1, 6, 7] + ([4, 5] if scaled else [])
    assert_same_bits(dirty[kept], clean[kept])


def test_a_nan_of_any_payload_becomes_the_one(rng):
    case = call(rng, "mxfp4", (128, 32), tokens=2, scaled=True)
    weights = torch.tensor([[-0x3EDCBB, 0x3F800000]] * 2, dtype=torch.int32).view(torch.float32)
    assert bool(weights[:, 0].isnan().all())
    compare(replace(case, expert_ids=torch.zeros(2, 2).int(), routing_weights=weights))


def test_the_end_of_a_row_reads_nothing_of_the_next(rng):
    """k = 96 ends within a step of 128; behind it lie the next row's Inf."""
    case = call(rng, "bf16", (96, 32))
    codes = [weight.codes.clone() for weight in case.weights]
    for part in codes:
        part[:, 1, :32] = float("inf")
    found = compare(replace(case, weights=tuple(PackedWeight("bf16", part) for part in codes)))
    assert bool(torch.isfinite(found[:, [0, 2]]).all()) and not bool(found.isfinite().all())


def test_strides_of_a_view(rng):
    """Weights that are part of a larger tensor, rows of x that are too."""
    case = call(rng, "nvfp4", (64, 32))
    gate, up = case.weights
    codes = torch.cat((gate.codes, up.codes), 1)
    scales = torch.cat((gate.scales, up.scales), 1)
    views = tuple(
        replace(weight, codes=codes[:, part], scales=scales[:, part])
        for weight, part in ((gate, slice(0, 32)), (up, slice(32, 64)))
    )
    wide = torch.cat((case.rows.values, torch.full((5, 16), NAN)), 1)
    assert_same_bits(
        replace(case, weights=views, rows=Rows(wide[:, :64], None)).gate_up(), case.gate_up()
    )


@pytest.mark.parametrize("launches", [1, 2])
def test_two_formats_are_refused(launches, rng):
    gate, up = (exact_weight(rng, name, 2, 32, 64) for name in ("nvfp4", "mxfp4"))
    case = replace(call(rng, "nvfp4", (64, 32)), weights=(gate, up))
    with pytest.raises(Unsupported, match="gate is nvfp4 and up is mxfp4"):
        case.gate_up(launches=launches)


@pytest.mark.parametrize("format", FORMATS)
def test_random_data(format, rng):
    """Rounded to bf16: an error of a dot shows only where it crosses a tie."""
    weights = tuple(random_weight(rng, format, 2, 64, 256) for _ in range(2))
    x = torch.randn(8, 256, generator=rng).bfloat16().float()
    ids = torch.randint(0, 2, (8, 1), generator=rng).int()
    case = Experts(weights, Rows(x, None), ids)
    found, expected = case.gate_up().double(), case.gate_up_reference().double()
    assert float((found - expected).norm() / expected.norm()) < 2.0**-11
