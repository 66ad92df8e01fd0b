"""Published sizes over ranks; and why the stock way, a sum of rounded parts, is not exact."""

from functools import cache

import pytest
import torch
import torch.distributed as dist

from exactmoe import ExpertBank, Limits, MoEConfig, MoELayer
from exactmoe.bank import Partition
from exactmoe.ops import DECODED, DEVICE
from exactmoe.parallel.rank_bank import RankBank
from exactmoe.parallel.rank_wire import RankTraffic, RankWire
from exactmoe.parallel.ranks import Ranks
from exactmoe.ranked import RankedLayer
from layers import CLASSES, assert_same_bits, random_call
from rank_processes import SIZES
from seed_bank import seed_bank, seed_call

H, INNER, EXPERTS, TOP_K = 4096, 2048, 8, 6


@cache
def bank_of_that_size() -> ExpertBank:
    """Made once a process, which takes longer than a call."""
    return seed_bank(H, INNER)


@cache
def alone(numerics: str) -> torch.Tensor:
    """Two rows in one process."""
    config = MoEConfig(H, INNER, EXPERTS, TOP_K, swiglu_limit=6.0, numerics=numerics)
    layer = MoELayer(config, bank_of_that_size(), limits=Limits(max_rows=2))
    return layer.experts(*seed_call(2, H))


def published(ranks: Ranks, numerics: str) -> int:
    """8 experts, top-6, (4096, 2048): 1 row, and own tokens of which the last ranks have none."""
    config = MoEConfig(H, INNER, EXPERTS, TOP_K, swiglu_limit=6.0, numerics=numerics)
    bank, limits = bank_of_that_size(), Limits(max_rows=2)
    x, ids, weights = seed_call(2, H)
    expected = alone(numerics)
    assert len(expected.unique()) > 100
    wire = RankWire(ranks, EXPERTS)
    layer = RankedLayer(config, bank, wire, limits=limits)
    assert layer.bank.nbytes < 0.6 * bank.nbytes
    assert_same_bits(layer.experts(x, ids, weights), expected, "replicated")
    own = RankWire(ranks, EXPERTS, tokens="own", returns="slots")
    layer = RankedLayer(config, RankBank(layer.bank.own, own), limits=limits)
    rows = slice(ranks.rank, ranks.rank + 1) if ranks.rank < 2 else slice(0, 0)
    found = layer.experts(x[rows], ids[rows], weights[rows], width=1)
    assert_same_bits(found, expected[rows], "own")
    return len(found)


@pytest.mark.slow
@pytest.mark.parametrize("numerics", CLASSES)
@pytest.mark.parametrize("size", SIZES)
def test_published_shape(pool, size, numerics):
    assert sum(pool.run(published, size, numerics)) == 2


def stock(ranks: Ranks) -> tuple[int, int, int]:
    """transformers' all-reduce form: each rank's experts rounded to bfloat16, then summed."""
    config = MoEConfig(128, 256, EXPERTS, TOP_K, swiglu_limit=6.0)
    bank = seed_bank(128, 256)
    whole = MoELayer(config, bank)
    x, ids, weights = random_call(torch.Generator().manual_seed(51), whole, 64)
    expected = whole.experts(x, ids, weights)
    exact = RankedLayer(config, bank, RankWire(ranks, EXPERTS)).experts(x, ids, weights)
    mine = [
        expert in Partition.even(EXPERTS, ranks.size).experts[ranks.rank] for expert in range(8)
    ]
    own = torch.tensor(mine)[ids.long()]
    total = whole.experts(x, torch.where(own, ids, -1), weights)
    dist.all_reduce(total, group=ranks.group)
    return (
        int((exact.view(torch.int16) != expected.view(torch.int16)).sum()),
        int((total.view(torch.int16) != expected.view(torch.int16)).sum()),
        expected.numel(),
    )


@pytest.mark.parametrize("size", SIZES)
def test_a_sum_of_rounded_parts_is_not_exact(pool, size):
    for exact, summed, count in pool.run(stock, size):
        assert exact == 0
        assert summed > count / 20  # 8 % of the numbers with two ranks, more with more


def joined(ranks: Ranks) -> None:
    bank = seed_bank(128, 256)
    wire = RankWire(ranks, EXPERTS, Partition(tuple(e * 5 % ranks.size for e in range(EXPERTS))))
    found = RankBank.cut(bank, wire).join()
    for given, back in zip(bank.buffers(), found.buffers(), strict=True):
        assert torch.equal(given, back)


@pytest.mark.parametrize("size", SIZES)
def test_all_experts_come_back(pool, size):
    pool.run(joined, size)


def traffic(ranks: Ranks) -> list[RankTraffic]:

    found = []
    for numerics, top_k, experts in (("a8", 6, 256), ("a16", 8, 288)):
        config = MoEConfig(H, INNER, experts, top_k, numerics=numerics)
        for tokens in ("replicated", "own"):
            for returns in ("slots", "partials"):
                wire = RankWire(ranks, experts, tokens=tokens, returns=returns)
                found.append(wire.traffic(1, config, DEVICE))
    return found


def test_traffic_of_one_token(pool):
    a8 = [RankTraffic(t, back) for t in (0, 4272) for back in (98_304, 16_384)]
    a16 = [RankTraffic(t, back) for t in (0, 8256) for back in (65_536, 16_384)]
    assert pool.run(traffic, 2) == [a8 + a16] * 2


def chosen_returns(ranks: Ranks) -> list[str]:
    """Of "auto": even over the ranks; every other expert, with four vectors a rank; 20 experts."""
    odd = Partition((0, 1) * 4)
    wires = [RankWire(ranks, 8), RankWire(ranks, 8, odd), RankWire(ranks, 20)]
    assert wires[1].partition.is_aligned
    return [wire.returns for wire in wires]


def test_what_comes_back_by_itself(pool):
    assert pool.run(chosen_returns, 2) == [["partials", "slots", "partials"]] * 2


def sent(ranks: Ranks) -> list[tuple[int, int]]:
    """Bytes that gathers and exchanges of a call bring in, beside the closed form."""
    counted = [0]
    gather, exchange = ranks.all_gather, ranks.exchange

    def counting(call):
        def run(mine, everyone):
            counted[0] += everyone.nbytes * (ranks.size - 1) // ranks.size
            call(mine, everyone)

        return run

    ranks.all_gather, ranks.exchange = counting(gather), counting(exchange)
    found = []
    for numerics in CLASSES:
        config = MoEConfig(128, 256, EXPERTS, TOP_K, numerics=numerics)
        for tokens in ("replicated", "own"):
            wire = RankWire(ranks, EXPERTS, tokens=tokens, returns="partials")
            layer = RankedLayer(config, seed_bank(128, 256), wire, limits=Limits(max_rows=3))
            counted[0] = 0
            layer.experts(*seed_call(3, 128))

            told = wire.traffic(3, config, DECODED)
            found.append((counted[0], told.tokens + told.back))
    return found


def test_bytes_that_come_are_those_of_the_closed_form(pool):
    for size in (2, 4):
        for found in pool.run(sent, size):
            assert found == [(told, told) for _, told in found]
