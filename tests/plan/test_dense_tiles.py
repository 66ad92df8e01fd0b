"""Which tile of the dense sm_90 kernels a call gets: every one can run, none wastes columns, and
the estimate has no step between widths.
"""

from dataclasses import replace

import pytest

from exactmoe.plan.dense_tiles import (
    DENSE_TILES,
    WIDEST_SEGMENTED,
    DenseProblem,
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


@pytest.mark.parametrize("name", ["shared gate_up", "shared down", "ffn gate_up", "ffn down"])
def test_one_more_token_costs_at_most_half_more(name):
    """By the estimate; tests/gpu/test_cliffs.py measures."""

    def cycles(tokens: int) -> float:
        problem = replace(PROBLEMS[name], num_tokens=tokens)
        return estimate(problem, dense_tile(problem))

    widths = [1, 8, 16, 32, 64, 96, 128, 192, 256, 512, 768, 1024, 2048, 4096]
    assert all(cycles(width + 1) <= 1.5 * cycles(width) for width in widths)


def test_a_tail_less_than_half_full_is_no_full_tile():
    tile = next(t for t in DENSE_TILES if (t.tokens, t.rows) == (256, 128))
    costs = [
        estimate(replace(SHARED_EXPERT, num_tokens=tokens), tile) for tokens in (1024, 1032, 1280)
    ]
    assert costs[0] < costs[1] < costs[0] + 0.5 * (costs[2] - costs[0])
