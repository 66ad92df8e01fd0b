"""Which tile of the dense sm_90 kernels a call gets: every one can run, none wastes columns, and
the estimate has no step between widths.
"""

from dataclasses import replace

import pytest

from exactmoe.errors import ConfigError
from exactmoe.plan import dense_tiles
from exactmoe.plan.dense_tiles import (
    DENSE_TILES,
    WIDEST_SEGMENTED,
    DenseProblem,
    best_span,
    dense_tile,
    estimate,
)

SHARED_EXPERT = DenseProblem("gate_up", 2048, 4096, 1)
FFN_DOWN = DenseProblem("down", 4096, 12288, 1)
PROBLEMS = {
    "shared gate_up": SHARED_EXPERT,
    "shared down": DenseProblem("down", 4096, 2048, 1),
    "ffn gate_up": DenseProblem("gate_up", 12288, 4096, 1),
    "ffn down": FFN_DOWN,
    "small": DenseProblem("gate_up", 64, 64, 1),
}


@pytest.fixture(autouse=True)
def no_switch(monkeypatch):
    monkeypatch.delenv("EXACTMOE_TILE", raising=False)


@pytest.mark.parametrize("tile", DENSE_TILES, ids=str)
def test_each_is_one_that_the_kernel_can_run(tile):
    """Eights of rows; a cluster's parts are whole eights of tokens; halves of gate and of up."""
    assert tile.tokens % 8 == 0 and 8 <= tile.tokens <= 256
    assert tile.rows in (32, 64, 128, 192)
    assert tile.tokens % (8 * tile.cluster) == 0
    assert tile.cluster in (1, 2, 4) and tile.blocks in (1, 2)
    assert 64 % tile.chunks == 0  # a segment of 4096 is whole stages


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("tokens", [1, 8, 9, 16, 64, 65, 129, 256, 257, 8192])
def test_none_is_wider_than_the_narrowest_that_holds_all_tokens(name, tokens):
    problem = replace(PROBLEMS[name], num_tokens=tokens)
    narrowest = min((t.tokens for t in DENSE_TILES if t.tokens >= tokens), default=256)
    assert dense_tile(problem).tokens <= narrowest


def test_a_segmented_sum_takes_no_more_than_registers_hold():
    for tokens in (1, 257, 4096):
        assert dense_tile(replace(FFN_DOWN, num_tokens=tokens)).tokens <= WIDEST_SEGMENTED
    assert dense_tile(replace(SHARED_EXPERT, num_tokens=4096)).tokens == 256


def test_few_tokens_use_all_multiprocessors():
    tile = dense_tile(SHARED_EXPERT)
    assert (tile.tokens, tile.rows) == (8, 32)
    assert 2 * SHARED_EXPERT.rows // tile.rows == 128


@pytest.mark.parametrize("forced", [8, 16, 32, 40, 64, 128])
def test_a_forced_width_takes_the_narrowest_that_holds_it(monkeypatch, forced):
    monkeypatch.setenv("EXACTMOE_TILE", str(forced))
    wanted = min(t.tokens for t in DENSE_TILES if t.tokens >= forced)
    for tokens in (1, 100, 5000):
        assert dense_tile(replace(SHARED_EXPERT, num_tokens=tokens)).tokens == wanted


# Tokens and rows of the fastest tile of gate_up and of down, by I and tokens (H 4096): measured,
# docs/log.md 2026-11-30. Not I 12288 at 4096 tokens: there the card's power limit decides.
FASTEST = {
    (2048, 1): ((8, 32), (8, 32)),
    (2048, 16): ((16, 32), (16, 32)),
    (2048, 64): ((64, 64), (64, 64)),
    (2048, 256): ((64, 128), (64, 128)),
    (2048, 1024): ((256, 128), (256, 128)),
    (2048, 4096): ((256, 128), (256, 128)),
    (12288, 1): ((8, 32), (8, 32)),
    (12288, 4): ((8, 32), (8, 32)),
    (12288, 16): ((16, 32), (16, 32)),
    (12288, 64): ((64, 192), (64, 64)),
    (12288, 256): ((128, 128), (64, 128)),
    (12288, 1024): ((256, 128), (128, 128)),
}


def pair(inner: int, tokens: int) -> tuple[DenseProblem, DenseProblem]:
    return (
        DenseProblem("gate_up", inner, 4096, tokens),
        DenseProblem("down", 4096, inner, tokens),
    )


@pytest.mark.parametrize(("inner", "tokens"), FASTEST)
def test_the_fastest_measured_tile_is_chosen(inner, tokens):
    chosen = [dense_tile(problem) for problem in pair(inner, tokens)]
    assert tuple((tile.tokens, tile.rows) for tile in chosen) == FASTEST[inner, tokens]


def test_a_cluster_at_16_tokens_pays_in_gate_up_alone():
    for inner in (2048, 12288):
        gate_up, down = (dense_tile(problem) for problem in pair(inner, 16))
        assert (gate_up.cluster, gate_up.blocks, down.cluster, down.blocks) == (2, 1, 1, 2)


# Where tokens just fill the multiprocessors, the next may cost more.
STEPS = {(2048, 128): 1.46, (12288, 512): 1.32}


@pytest.mark.parametrize("inner", [1408, 2048, 4096, 12288])
def test_one_more_token_costs_at_most_a_quarter_more(inner):
    """By the estimate; tests/gpu/test_cliffs.py measures."""

    def cycles(tokens: int) -> float:
        return sum(estimate(problem, dense_tile(problem)) for problem in pair(inner, tokens))

    steps = {(1408, 128): 1.44, **STEPS}
    for width in (1, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096):
        assert cycles(width + 1) <= steps.get((inner, width), 1.25) * cycles(width), width


def test_token_tiles_are_made_equal_where_that_is_faster():
    """513 tokens: four tiles of up to 144 in one round, and not two of 256 and one of 1."""
    problem = replace(SHARED_EXPERT, num_tokens=513)
    tile = dense_tile(problem)
    assert (tile.tokens, best_span(problem, tile)) == (256, 144)
    problem = replace(SHARED_EXPERT, num_tokens=1024)
    assert best_span(problem, dense_tile(problem)) == 256
    assert best_span(SHARED_EXPERT, dense_tile(SHARED_EXPERT)) == 8


@pytest.mark.parametrize("tile", DENSE_TILES, ids=str)
def test_a_span_is_one_that_the_kernel_can_run(tile):
    for tokens in (1, 17, 100, 257, 999, 4097):
        assert 0 < best_span(replace(SHARED_EXPERT, num_tokens=tokens), tile) <= tile.tokens


def test_a_tail_less_than_half_full_is_no_full_tile():
    """1032 tokens: most items of the tail need a round more, which is a short one."""
    tile = next(t for t in DENSE_TILES if (t.tokens, t.rows) == (256, 128))
    costs = [
        dense_tiles._cycles(replace(SHARED_EXPERT, num_tokens=tokens), tile, 256)
        for tokens in (1024, 1032, 1280)
    ]
    assert costs[0] < costs[1] < costs[0] + 0.5 * (costs[2] - costs[0])


def test_a_width_that_the_path_does_not_offer_is_refused(monkeypatch):
    monkeypatch.setenv("EXACTMOE_TILE", "24")
    with pytest.raises(ConfigError, match="EXACTMOE_TILE is 24; allowed on backend 'cuda': 8, 16"):
        dense_tile(SHARED_EXPERT)
