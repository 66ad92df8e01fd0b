"""Ranks on the kernels of a GPU, interpreted: e4m3 codes, bf16 rows and slots, int32 tables."""

import os

import pytest
import torch

from exactmoe import Limits
from exactmoe.parallel.rank_wire import RankWire
from exactmoe.parallel.ranks import Ranks
from exactmoe.ranked import RankedLayer
from layers import assert_same_bits, layer_of, random_bank, random_call
from triton_device import INTERPRETED, use_triton

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="tests/gpu has it compiled"),
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
]


def interpreted(ranks: Ranks, numerics: str, returns: str) -> int:
    use_triton()
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        return compared(ranks, numerics, returns)
    finally:
        del os.environ["TRITON_INTERPRET"]


def compared(ranks: Ranks, numerics: str, returns: str) -> int:
    rng = torch.Generator().manual_seed(91)
    layer = layer_of(random_bank(rng, "nvfp4", 4, 128, 128), 2, "triton", numerics=numerics)
    x, ids, weights = random_call(rng, layer, 3)
    ids[1, 0] = -1
    expected = layer.experts(x, ids, weights)
    count = 0
    for tokens in ("replicated", "own"):
        wire = RankWire(ranks, 4, tokens=tokens, returns=returns)
        limits = Limits(max_rows=4)
        ranked = RankedLayer(layer.config, layer.bank, wire, limits=limits, backend="triton")
        assert ranked.plan().backend == "triton"
        rows = slice(0, 3) if tokens == "replicated" else slice(3 * ranks.rank, 3)
        width = None if tokens == "replicated" else 3
        found = ranked.experts(x[rows], ids[rows], weights[rows], width=width)
        assert_same_bits(found, expected[rows], f"{tokens} {returns}")
        ranked.check()
        count += len(found)
    return count


@pytest.mark.slow
@pytest.mark.parametrize(("numerics", "returns"), [("a16", "slots"), ("a8", "partials")])
def test_two_ranks(pool, numerics, returns):
    assert pool.run(interpreted, 2, numerics, returns) == [6, 3]
