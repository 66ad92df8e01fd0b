"""Ranks give the bits of one card: tokens, returns, classes, widths, numbers of ranks."""

import pytest
import torch

from exactmoe import Limits, MoELayer
from exactmoe.bank import Partition
from exactmoe.parallel.rank_wire import RankWire
from exactmoe.parallel.ranks import Ranks
from exactmoe.ranked import RankedLayer
from exactmoe.report.profile import profile
from layers import CLASSES, assert_same_bits, normal
from rank_processes import SIZES
from small_layers import EXPERTS, VOCABULARY, small_layer

WIDTHS = (1, 6, 65)


def over(layer: MoELayer, wire: RankWire, **settings) -> RankedLayer:
    return RankedLayer(
        layer.config,
        layer.bank,
        wire,
        layer.router,
        layer.shared,
        limits=settings.pop("limits", Limits(max_rows=64, checks=True)),
        **settings,
    )


def partitions(size: int) -> list[Partition]:
    odd = Partition(tuple(expert % size for expert in range(EXPERTS)), "every other")
    uneven = Partition((0,) * (EXPERTS - size + 1) + tuple(range(1, size)), "uneven")
    return [Partition.even(EXPERTS, size), odd, uneven]


def ways(partition: Partition) -> tuple[str, ...]:
    return ("slots", "partials") if partition.is_aligned else ("slots",)


def replicated(ranks: Ranks) -> int:
    compared = 0
    for numerics in CLASSES:
        for kind in ("score", "hash"):
            rng = torch.Generator().manual_seed(11)
            layer = small_layer(rng, kind, numerics)
            x = normal(rng, max(WIDTHS), layer.config.hidden_size)
            x[3, 5] = float("nan")
            token_ids = torch.randint(0, VOCABULARY, (len(x),), generator=rng)
            for partition in partitions(ranks.size):
                for returns in ways(partition):
                    wire = RankWire(ranks, EXPERTS, partition, returns=returns)
                    ranked = over(layer, wire)
                    for width in WIDTHS:
                        given = (x[:width], token_ids[:width])
                        label = f"{numerics} {kind} {partition.rule} {returns} {width}"
                        assert_same_bits(ranked(*given), layer(*given), label)
                        compared += 1
    return compared


@pytest.mark.parametrize("size", SIZES)
def test_replicated_tokens(pool, size):
    assert min(pool.run(replicated, size)) > 30


def own(ranks: Ranks) -> int:
    compared = 0
    for numerics in CLASSES:
        rng = torch.Generator().manual_seed(12)
        layer = small_layer(rng, "hash", numerics)
        x = normal(rng, 200, layer.config.hidden_size)
        token_ids = torch.randint(0, VOCABULARY, (len(x),), generator=rng)
        for partition in partitions(ranks.size):
            for returns in ways(partition):
                wire = RankWire(ranks, EXPERTS, partition, "own", returns)
                ranked = over(layer, wire, limits=Limits(max_rows=16, checks=True))
                # Calls of up to three pieces; some ranks have no token in a piece, or in the call.
                for counts in ((1, 0, 0, 0), (0, 7, 16, 3), (40, 0, 17, 33)):
                    start, count = sum(counts[: ranks.rank]), counts[ranks.rank]
                    rows = slice(start, start + count)
                    given = (x[rows], token_ids[rows])
                    found = ranked(*given, width=max(counts))
                    label = f"{numerics} {partition.rule} {returns} {counts}"
                    assert_same_bits(found, layer(*given), label)
                    compared += count > 0
    return compared


@pytest.mark.parametrize("size", SIZES)
def test_own_tokens(pool, size):
    assert sum(pool.run(own, size)) > 20


def steps(ranks: Ranks, own_tokens: bool) -> list[str]:
    rng = torch.Generator().manual_seed(13)
    layer = small_layer(rng)
    wire = RankWire(ranks, EXPERTS, tokens="own" if own_tokens else "replicated")
    ranked = over(layer, wire)
    with profile(ranked) as found:
        ranked(normal(rng, 4, layer.config.hidden_size))
    return [one.name for one in found.spans() if not one.inner]


@pytest.mark.parametrize("own_tokens", [False, True])
def test_a_profile_of_a_rank_has_what_is_sent_and_returned(pool, own_tokens):
    expected = [
        "shared", "router", "dispatch", "sort", "gate_up", "down", "return", "combine", "call",
    ]  # fmt: skip
    assert pool.run(steps, 2, own_tokens) == [expected, expected]
