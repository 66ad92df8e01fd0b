"""Which tile a call gets, and what says so."""

from dataclasses import replace

import pytest

from exactmoe.errors import ConfigError
from exactmoe.kernels.cuda.source import TOKENS
from exactmoe.plan.tiles import OPS, TILES, choose_tile, offered, rows_per_expert, tile


@pytest.fixture(autouse=True)
def no_switch(monkeypatch):
    monkeypatch.delenv("EXACTMOE_TILE", raising=False)


@pytest.mark.parametrize("backend", TILES)
def test_the_table_is_ascending_and_fits_the_instruction(backend):
    assert tuple(TILES[backend]) == OPS
    for op, tiles in TILES[backend].items():
        widths = [tile.tokens for tile in tiles]
        assert widths == sorted(set(widths))
        # wgmma takes any multiple of 8; a Triton dot at least 16.
        least = 8 if backend.startswith("cuda") and op != "dense_mlp" else 16
        assert all(width % least == 0 for width in widths)
        assert all(tile.matrix_rows >= 64 for tile in tiles)


@pytest.mark.parametrize(
    ("tokens", "width"),
    # 288 experts, top 8; facts: 114 rows an expert at 4096 tokens, 28 at 1024.
    [(1, 8), (8, 8), (64, 8), (256, 16), (1024, 40), (2048, 128), (4096, 128), (8192, 128)],
)
def test_the_narrowest_tile_that_holds_an_expert(tokens, width):
    assert tile("cuda", "sm_90", "gate_up", tokens * 8, 288).tokens == width


def test_class_a8_has_the_same_tiles_but_the_widest():
    """Two accumulators a lane, of a chain and of the sums, leave registers for 112 tokens."""
    for op in ("gate_up", "down"):
        *narrow, widest = TILES["cuda_a8"][op]
        assert tuple(narrow) == tuple(t for t in TILES["cuda"][op] if t.tokens <= 64)
        assert widest == replace(TILES["cuda"][op][-1], tokens=112)
        for tokens, width in ((1, 8), (256, 16), (1024, 40), (2048, 112), (8192, 112)):
            assert tile("cuda_a8", "sm_90", op, tokens * 8, 288).tokens == width
    assert TILES["cuda_a8"]["dense_mlp"] == TILES["cuda"]["dense_mlp"]


def test_a_width_of_either_class_can_be_forced_on_the_fast_path():
    """A layer of class a8 has dense parts of the other table."""
    assert offered("cuda") == offered("cuda_a8")
    assert {112, 128} <= set(offered("cuda"))
    assert 112 not in offered("triton")


@pytest.mark.parametrize("activation", TOKENS)
def test_tiles_of_the_fast_path_are_those_of_its_kernels(activation):
    """kernels/cuda/source.py has sizes of shared memory for these widths."""
    backend = {"a16": "cuda", "a8": "cuda_a8"}[activation]
    for op in ("gate_up", "down"):
        assert tuple(tile.tokens for tile in TILES[backend][op]) == TOKENS[activation]


def test_rows_of_an_expert_in_use():
    assert rows_per_expert(0, 288) == 0
    assert rows_per_expert(1, 288) == pytest.approx(1.0)
    assert rows_per_expert(7, 1) == 7
    assert rows_per_expert(8192, 288) == pytest.approx(28.4, abs=0.1)
    assert rows_per_expert(512, 288) == pytest.approx(512 / 239.5, abs=0.05)  # measured: 241


def test_a_dense_mlp_takes_its_rows_as_they_are():
    for rows in (1, 16, 17, 64, 65):
        assert tile("triton", "sm_90", "dense_mlp", rows, 1).tokens >= rows


def test_every_offered_width_can_be_forced(monkeypatch):
    for backend in TILES:
        for width in offered(backend):
            monkeypatch.setenv("EXACTMOE_TILE", str(width))
            choice = choose_tile(backend, "sm_90", "gate_up", 8, 288)
            own = {tile.tokens for tile in TILES[backend]["gate_up"]}
            # A width that only dense parts offer is wider than all: the widest.
            assert choice.tile.tokens == min((w for w in own if w >= width), default=max(own))
            assert choice.reason == f"EXACTMOE_TILE={width}"


def test_an_op_without_the_forced_width_takes_the_next_wider(monkeypatch):
    monkeypatch.setenv("EXACTMOE_TILE", "8")
    assert tile("cuda", "sm_90", "dense_mlp", 1, 1).tokens == 16


@pytest.mark.parametrize("width", [1, 24, 4096])
def test_a_width_that_is_not_offered_is_refused(width, monkeypatch):
    monkeypatch.setenv("EXACTMOE_TILE", str(width))
    widths = ", ".join(map(str, offered("triton")))
    with pytest.raises(ConfigError, match=f"EXACTMOE_TILE is {width}; .*'triton': {widths}$"):
        tile("triton", "sm_80", "down", 8, 4)


def test_the_reason_says_how_many_rows():
    assert str(choose_tile("cuda", "sm_90", "down", 8192, 288)) == (
        "down: 40 tokens x 128 rows, k 128, 20 warps "
        "(28.4 rows an expert in use; the narrowest that holds them)"
    )
    assert "the widest" in choose_tile("triton", "sm_80", "down", 10**6, 8).reason
