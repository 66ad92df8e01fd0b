"""verify of layers over ranks: every dimension that runs there, and faults that it finds."""

import pytest
import torch

from exactmoe import Limits, verify
from exactmoe.parallel.rank_wire import RankWire
from exactmoe.parallel.ranks import Ranks
from exactmoe.proof.vectors import vectors_of
from exactmoe.ranked import RankedLayer
from exactmoe.ranked_dense import RankedDense, cuts, own_rows
from rank_processes import SIZES
from small_layers import EXPERTS, small_layer

FEW = {"widths": (1, 2, 17), "repeats": 2, "backend_rows": 1}
SOME = ("repeats", "width", "order", "pieces", "backend", "cards", "callers", "ranks")


def made(ranks: Ranks, numerics: str = "a16") -> tuple[RankedLayer, RankedLayer]:
    """A layer over ranks with a cut shared expert, and the one in one process that it came from."""
    plain = small_layer(torch.Generator().manual_seed(61), "score", numerics)
    weights = tuple(plain.shared.bank.weights())
    size = plain.config.hidden_size
    cut = cuts([weight.format for weight in weights], size, size, ranks.size)
    shared = RankedDense(own_rows(weights, cut, ranks.rank), cut, ranks, swiglu_limit=10.0)
    wire = RankWire(ranks, EXPERTS)
    limits = Limits(max_rows=40)
    return RankedLayer(plain.config, plain.bank, wire, plain.router, shared, limits), plain


def proved(ranks: Ranks, numerics: str) -> dict:
    layer, plain = made(ranks, numerics)
    report = verify(layer, dimensions=SOME, **FEW)
    dense = verify(layer.shared, dimensions=("width", "ranks"), **FEW)
    report.raise_on_mismatch()
    dense.raise_on_mismatch()
    same = vectors_of(layer, "it") == vectors_of(plain, "it")
    counts = {name: count.comparisons for name, count in report.dimensions.items()}
    return {"counts": counts, "not_run": report.not_run, "same": same, "dense": dense.comparisons}


@pytest.mark.parametrize("size", SIZES)
def test_layers_over_ranks_are_proved(pool, size):
    for numerics in ("a16", "a8") if size == 2 else ("a16",):
        for one in pool.run(proved, size, numerics):
            assert one["same"] and one["dense"] > 0
            assert set(one["not_run"]) == {"cards", "callers"}
            assert set(one["counts"]) >= set(SOME) - {"cards", "callers"}
            assert one["counts"]["ranks"] >= 2 * 72 * (size + 2)


def faulty(ranks: Ranks) -> list[str]:
    """Rank 1 takes one expert for another; and one word of what rank 1 sends is another."""
    found = []
    layer, _ = made(ranks)
    if ranks.rank == 1:
        layer.wire.local[1 + EXPERTS - 1] = 0
    report = verify(layer, dimensions=("ranks",), **FEW)
    found.append(str(report.dimensions["ranks"].first))

    layer, _ = made(ranks)
    gather = ranks.all_gather

    def wrong(mine, everyone):
        if ranks.rank == 1 and mine.dtype == torch.float32 and mine.ndim == 3:
            mine[0, 0, 3] += 1.0
        gather(mine, everyone)

    ranks.all_gather = wrong
    report = verify(layer, dimensions=("ranks",), **FEW)
    found.append(str(report.dimensions["ranks"].first))
    return found


def test_faults_are_found(pool):
    for said in pool.run(faulty, 2):
        for first in said:
            assert first.startswith("ranks, ") or "y of rank" in first, first
            assert "None" not in first


def told(ranks: Ranks) -> tuple[str, ...]:
    """What rank 1 finds is told on all."""
    from exactmoe.cli.over_ranks import is_first, others_failed
    from exactmoe.proof import Report

    settings = {"ranks": ranks}
    assert is_first(settings) == (ranks.rank == 0) and is_first({})
    report, y = Report("layer 3"), torch.zeros(2, 4)
    report.compare("ranks", "as it is", y, y + (ranks.rank == 1))
    assert others_failed({}, [report]) == ()
    return others_failed(settings, [report])


def test_what_another_rank_found(pool):
    first, second, third = pool.run(told, 3)
    assert first == third and second == ()
    assert first[0].startswith("rank 1: layer 3: ranks (as it is)") and len(first) == 2
    assert first[1] == "rank 1: layer 3: 2 rows differ"
