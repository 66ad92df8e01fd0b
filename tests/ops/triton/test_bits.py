"""What only a card can show of the matrix ops: one bit pattern for every tile, width and neighbour,
and how good its sums are.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from exactmoe.formats.rows import Rows
from exactmoe.plan.tiles import TILES, Tile
from layers import assert_same_bits, true_values
from paths import random_weight
from triton_experts import FORMATS, Experts, dense, reference_rows

pytestmark = pytest.mark.gpu
EXPERTS, TOKENS, TOP_K = 5, 150, 2
# Beside those of the table: other heights, steps and warps.
OTHERS = (
    Tile(16, 64, 64, 64, 4, 2),
    Tile(32, 128, 128, 128, 8, 2),
    Tile(64, 32, 64, 128, 4, 3),
    Tile(128, 32, 64, 64, 8, 2),
    Tile(256, 32, 64, 64, 8, 2),
)


def tiles(op: str) -> tuple[Tile, ...]:
    return TILES["triton"][op] + OTHERS


def normal(rng: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=rng)


def gate_up_call(rng, format: str, scaled: bool) -> Experts:
    ids = torch.rand(TOKENS, EXPERTS, generator=rng).argsort(-1)[:, :TOP_K].int()
    weights = tuple(random_weight(rng, format, EXPERTS, 208, 640) for _ in range(2))
    rows = reference_rows(normal(rng, TOKENS, 640), scaled)
    routing = normal(rng, TOKENS, TOP_K) if scaled else None
    return Experts(weights, rows, ids, routing, 1.5)


def some(case: Experts, tokens: list[int]) -> Experts:
    """The call with these tokens only."""
    scales = case.rows.scales
    rows = Rows(case.rows.values[tokens], None if scales is None else scales[tokens])
    routing = None if case.routing_weights is None else case.routing_weights[tokens]
    ids = case.expert_ids[tokens]
    return replace(case, rows=rows, expert_ids=ids, routing_weights=routing)


CALLS = [(format, False) for format in FORMATS] + [(format, True) for format in FORMATS[:4]]


@pytest.mark.parametrize(("format", "scaled"), CALLS)
def test_gate_up_has_one_bit_pattern(format, scaled, rng):
    case = gate_up_call(rng, format, scaled)
    expected = case.gate_up(tiles("gate_up")[0])
    for tile in tiles("gate_up")[1:]:
        assert_same_bits(case.gate_up(tile), expected, str(tile))
    for tokens in ([0], [149], [3, 77], list(range(149, -1, -1)), list(range(0, 150, 7))):
        slots = [TOP_K * token + k for token in tokens for k in range(TOP_K)]
        for tile in (tiles("gate_up")[0], tiles("gate_up")[3]):
            assert_same_bits(some(case, tokens).gate_up(tile), expected[slots], str(tokens[:3]))


@pytest.mark.parametrize(("format", "scaled"), CALLS)
def test_down_has_one_bit_pattern(format, scaled, rng):
    weight = random_weight(rng, format, EXPERTS, 208, 640)
    ids = torch.randint(-1, EXPERTS, (TOKENS, TOP_K), generator=rng).int()
    rows = reference_rows(normal(rng, TOKENS * TOP_K, 640), scaled)
    case = Experts((weight,), rows, ids)
    expected = case.down(False, tiles("down")[0])
    for tile in tiles("down")[1:]:
        assert_same_bits(case.down(False, tile), expected, str(tile))


# k of down is no multiple of the blocks' 32, which MXFP4 needs: there 224.
DENSE = [(format, (640, 224 if format == "mxfp4" else 208)) for format in FORMATS]
DENSE += [(format, (4096 + 64, 5120)) for format in FORMATS]


@pytest.mark.parametrize(("format", "sizes"), DENSE, ids=str)
def test_dense_mlp_has_one_bit_pattern(format, sizes, rng):
    hidden, inner = sizes
    shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
    weights = tuple(random_weight(rng, format, 1, *shape) for shape in shapes)
    x = normal(rng, TOKENS, hidden).bfloat16()
    expected_h, expected = dense(x, weights, 1.5, tiles("dense_mlp")[0])
    for tile in tiles("dense_mlp")[1:]:
        h, out = dense(x, weights, 1.5, tile)
        assert_same_bits(h, expected_h, str(tile))
        assert_same_bits(out, expected, str(tile))
    for token in (0, 77, 149):
        h, out = dense(x[token : token + 1], weights, 1.5)
        assert_same_bits(out, expected[token : token + 1], str(token))


@pytest.mark.parametrize("scaled", [False, True])
def test_neighbours_do_not_matter(scaled, rng):
    case = gate_up_call(rng, "nvfp4", scaled)
    expected = case.gate_up()
    values = case.rows.values.clone()
    values[1::2] = float("nan")
    if not scaled:
        values[3::4] = float("inf")
    dirty = replace(case, rows=Rows(values, case.rows.scales))
    kept = [TOP_K * token + k for token in range(0, TOKENS, 2) for k in range(TOP_K)]
    assert_same_bits(dirty.gate_up()[kept], expected[kept])


@pytest.mark.parametrize(("format", "scaled"), CALLS)
def test_error_of_a_dot(format, scaled, rng):
    """Contract section 8: relative L2 of k = 4096 against float64 below 2^-17."""
    weight = random_weight(rng, format, 2, 256, 4096)
    rows = reference_rows(normal(rng, 128, 4096), scaled)
    ids = torch.randint(0, 2, (128, 1), generator=rng).int()
    found = Experts((weight,), rows, ids).down(False).double()
    scales = 1.0 if rows.scales is None else rows.scales.double().repeat_interleave(128, -1)
    x, true = rows.values.double() * scales, true_values(weight)
    expected = torch.stack([true[expert] @ x[slot] for slot, expert in enumerate(ids.flatten())])
    assert float((found - expected).norm() / expected.norm()) < 2.0**-17
