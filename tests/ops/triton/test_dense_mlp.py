"""dense_mlp on the card's path: the reference's bytes where sums are exact, and its segments."""

from dataclasses import replace

import pytest
import torch

from exactmoe import reference
from exactmoe.formats import PackedWeight
from exactmoe.ops.triton import dense_mlp
from exactmoe.ops.triton.prepare import prepare
from exactmoe.plan.tiles import Tile
from layers import assert_same_bits
from paths import random_weight
from triton_experts import FORMATS, TILE, dense, dense_down, dense_gate_up, exact_weight

LIMIT = 0.75


def weights_of(rng, format, hidden, inner):
    sizes = ((inner, hidden), (inner, hidden), (hidden, inner))
    return tuple(exact_weight(rng, format, 1, *size) for size in sizes)


def integers(rng, tokens, hidden):
    return torch.randint(-2, 3, (tokens, hidden), generator=rng).bfloat16()


def compare_stages(x, weights, limit, tile=TILE) -> None:
    """h by bytes; out from the path's own h, whose sums are not exact, by error."""
    h, out = dense(x, weights, limit, tile)
    gate, up, down = weights
    expected = reference.dense_mlp(x, gate, up, down, limit)
    assert float((out - expected).norm()) <= 2.0**-17 * float(expected.norm())
    compare_h(h, x, gate, up, limit)


def compare_h(h, x, gate, up, limit) -> None:
    identity = PackedWeight("bf16", torch.eye(gate.rows)[None].bfloat16())
    through = reference.dense_mlp(x, gate, up, identity, limit)
    assert_same_bits(h.float() + 0.0, through)  # a sum is never -0


@pytest.mark.parametrize("format", FORMATS)
def test_formats(format, rng):
    compare_stages(integers(rng, 5, 160), weights_of(rng, format, 160, 64), LIMIT)


@pytest.mark.parametrize("sizes", [(96, 160), (32, 32), (704, 96)], ids=str)
def test_sizes_without_a_limit(sizes, rng):
    compare_stages(integers(rng, 3, sizes[0]), weights_of(rng, "mxfp4", *sizes), None)


@pytest.mark.parametrize("tokens", [1, 16, 17, 150])
def test_widths(tokens, rng):
    compare_stages(integers(rng, tokens, 96), weights_of(rng, "bf16", 96, 48), LIMIT)


def test_rows_that_fill_half_of_the_matrix(rng):
    tile = replace(TILE, rows=16)
    compare_stages(integers(rng, 3, 96), weights_of(rng, "bf16", 96, 80), LIMIT, tile)


def test_no_tokens(rng):
    h, out = dense(integers(rng, 0, 96), weights_of(rng, "bf16", 96, 32))
    assert h.shape == (0, 32) and out.shape == (0, 96)


@pytest.mark.parametrize("format", FORMATS)
def test_two_segments_and_16_columns(format, rng):
    """k = 4096 + 16 (32 for MXFP4): the last segment is one short step."""
    hidden = 4096 + (32 if format == "mxfp4" else 16)
    x = torch.zeros(2, hidden)
    x[:, 4000:] = torch.randint(-2, 3, (2, hidden - 4000), generator=rng).float()
    gate, up, _ = weights_of(rng, format, hidden, 32)
    compare_h(dense_gate_up(x.bfloat16(), gate, up, LIMIT), x.bfloat16(), gate, up, LIMIT)


@pytest.mark.parametrize("length", [128, 256])
def test_a_segment_ends_at_4096(length):
    """2^24 and a segment of 1 + 1: added one by one to 2^24 they would vanish. One step or two."""
    inner = 4096 + length
    ones = [4096, inner - 1]
    h = torch.zeros(1, inner)
    h[0, [0, *ones]] = torch.tensor([2.0**12, 1.0, 1.0])
    weight = torch.zeros(1, 1, inner)
    weight[0, 0, [0, *ones]] = torch.tensor([2.0**12, 1.0, 1.0])
    out = dense_down(h.bfloat16(), PackedWeight("bf16", weight.bfloat16()))
    assert out.item() == 2.0**24 + 2


def test_random_data(rng):
    sizes = ((48, 320), (48, 320), (320, 48))
    weights = tuple(random_weight(rng, "nvfp4", 1, *size) for size in sizes)
    x = torch.randn(6, 320, generator=rng).bfloat16()
    _, out = dense(x, weights)
    expected = reference.dense_mlp(x, *weights, None)
    assert float((out - expected).norm() / expected.norm()) < 2.0**-10


def test_small_weights_are_cut_in_more_programs():
    """2048 rows fill a card; 12288 rows, and many tokens, keep the tile's height."""
    meta = {"dtype": torch.bfloat16, "device": "meta"}
    for rows, tokens, expected in ((2048, 1, 16), (2048, 1024, 64), (12288, 1, 64)):
        gate = prepare(PackedWeight("bf16", torch.empty(1, rows, 4096, **meta)))
        down = prepare(PackedWeight("bf16", torch.empty(1, 4096, rows, **meta)))
        x, h = (torch.empty(tokens, size, **meta) for size in (4096, rows))
        given = (gate, gate, down), None, h, torch.empty(tokens, 4096, device="meta")
        tile = Tile(128, 64, 128, 64, 8, 3)
        first, second = dense_mlp.launches(x, *given, tile, "sm_90")
        assert first.tile.rows == expected and first.grid[0] >= 128
        assert second.grid[0] >= 128 and second.tile.matrix_rows >= 64
