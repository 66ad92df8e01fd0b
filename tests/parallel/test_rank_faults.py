"""What goes wrong between ranks: it is said on every rank, with the ranks' values, and in time."""

import copy
import os
import pickle
import time
from datetime import timedelta
from importlib import metadata

import pytest
import torch
import torch.distributed as dist

from exactmoe import Limits, Router, RouterConfig
from exactmoe.bank import Partition
from exactmoe.errors import BitMismatch, ConfigError, RankLost, Unsupported
from exactmoe.parallel.rank_bank import RankBank
from exactmoe.parallel.rank_wire import RankWire
from exactmoe.parallel.ranks import Ranks, launched
from exactmoe.ranked import RankedLayer
from layers import assert_same_bits, normal
from rank_processes import on_ranks
from small_layers import EXPERTS, small_layer

ODD = Partition(tuple(expert % 2 for expert in range(EXPERTS)))


def test_no_group():
    assert not dist.is_initialized() and not launched()
    for make in (Ranks, Ranks.auto):
        with pytest.raises(ConfigError, match="not initialised; allowed: .*torchrun"):
            make()


class Disagreeing:
    """Makes a layer whose facts are others on rank 1."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.first = ranks, ranks.rank == 0
        self.rng = torch.Generator().manual_seed(41)

    def layer(self, **changes) -> RankedLayer:
        plain = small_layer(self.rng, numerics=changes.get("numerics", "a16"))
        router = changes.get("router", plain.router)
        partition = changes.get("partition")
        wire = RankWire(self.ranks, EXPERTS, partition, changes.get("tokens", "replicated"))
        limits = Limits(changes.get("max_rows", 64))
        backend = changes.get("backend", "cpu")
        return RankedLayer(plain.config, plain.bank, wire, router, plain.shared, limits, backend)

    def numerics(self) -> RankedLayer:
        return self.layer(numerics="a16" if self.first else "a8")

    def partition(self) -> RankedLayer:
        return self.layer(partition=None if self.first else ODD)

    def tokens(self) -> RankedLayer:
        return self.layer(tokens="replicated" if self.first else "own")

    def max_rows(self) -> RankedLayer:
        return self.layer(max_rows=64 if self.first else 32)

    def backend(self) -> RankedLayer:
        return self.layer(backend="cpu" if self.first else "reference")

    def router(self) -> RankedLayer:
        weight = torch.ones(EXPERTS, 64) * (1.0 if self.first else 1.5)
        return self.layer(router=Router(weight, config=RouterConfig("sigmoid")))

    def version(self) -> RankedLayer:
        from exactmoe.parallel import rank_bank

        rank_bank.version = metadata.version if self.first else lambda name: "0.0.7"
        try:
            return self.layer()
        finally:
            rank_bank.version = metadata.version


def disagreeing(ranks: Ranks, what: str) -> str:
    try:
        getattr(Disagreeing(ranks), what)()
    except ConfigError as error:
        return str(error)
    return "nothing was said"


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("numerics", "the config: rank 0: {"),
        ("partition", "the partition: rank 0: (0, 0, 0, 0, 1, 1, 1, 1); rank 1: (0, 1, 0, 1, "),
        ("tokens", "tokens: rank 0: 'replicated'; rank 1: 'own'"),
        ("max_rows", "max_rows: rank 0: 64; rank 1: 32"),
        ("backend", "the backend: rank 0: 'cpu'; rank 1: 'reference'"),
        ("router", "the router: rank 0: '"),
        ("version", "the version of exactmoe: rank 0: '"),
    ],
)
def test_ranks_that_disagree(pool, what, named):
    first, second = pool.run(disagreeing, 2, what)
    assert f"the ranks disagree about {named}" in first
    assert first.partition(":")[2] == second.partition(":")[2]
    assert "allowed: the same on every rank" in first


def other_tokens(ranks: Ranks) -> str:
    rng = torch.Generator().manual_seed(42)
    plain = small_layer(rng)
    wire = RankWire(ranks, EXPERTS)
    limits = Limits(checks=True)
    layer = RankedLayer(plain.config, plain.bank, wire, plain.router, limits=limits)
    x = normal(rng, 3, 64)
    layer(x)
    if ranks.rank == 1:
        x[2, 7] += 1
    try:
        layer(x)
    except ConfigError as error:
        return str(error)
    return "nothing was said"


def test_replicated_tokens_that_are_not(pool):
    for text in pool.run(other_tokens, 3):
        assert "the ranks disagree about x of a call: rank 0, 2: '" in text


def faulty_calls(ranks: Ranks) -> list[str]:
    """An id out of range and slots that are not served are raised on all ranks, once."""
    rng = torch.Generator().manual_seed(43)
    plain = small_layer(rng, "bare")
    said = []
    for tokens in ("replicated", "own"):
        layer = RankedLayer(plain.config, plain.bank, RankWire(ranks, EXPERTS, tokens=tokens))
        x, weights = normal(rng, 2, 64), torch.ones(2, 2)
        ids = torch.tensor([[0, 7], [1, EXPERTS]])
        if tokens == "own" and ranks.rank == 1:
            ids = ids[:, :1].repeat(1, 2)
        layer.experts(x, ids, weights)
        said.append(raised(layer.check))
        layer.check()
        if ranks.rank == 1:
            layer.wire.local[1:5] = 0  # as if two ranks served the first experts
        layer.experts(x, ids.clamp(max=7), weights)
        said.append(raised(layer.check))
        layer.check()
    return said


def raised(call) -> str:
    try:
        call()
    except (ConfigError, BitMismatch) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was said"


def test_faults_in_calls(pool):
    found = pool.run(faulty_calls, 2)
    assert found[0] == found[1]
    beyond, twice, beyond_own, twice_own = found[0]
    for text in (beyond, beyond_own):
        assert text.startswith("ConfigError: an expert id was >= num_experts = 8 on ranks [0, 1]")
    for text in (twice, twice_own):
        assert text.startswith("BitMismatch: ranks [1] of the partition")


def refused(ranks: Ranks) -> list[str]:
    rng = torch.Generator().manual_seed(44)
    plain = small_layer(rng)
    own = RankedLayer(plain.config, plain.bank, RankWire(ranks, EXPERTS, tokens="own"))
    layer = RankedLayer(plain.config, plain.bank, RankWire(ranks, EXPERTS), plain.router)
    x, ids, weights = normal(rng, 5, 64), torch.zeros(5, 2).int(), torch.ones(5, 2)
    said = []
    for call in (
        lambda: own.experts(x, ids, weights, width=4),
        lambda: layer(x, width=8),
        lambda: RankWire(ranks, EXPERTS, tokens="mine"),
        lambda: RankWire(ranks, 24, Partition((0, 1) * 12), returns="partials"),
        lambda: RankWire(ranks, EXPERTS, Partition.even(EXPERTS, 3)),
        lambda: RankedLayer(plain.config, plain.bank),
        lambda: RankBank(plain.bank, layer.wire),
        lambda: pickle.dumps(layer),
        lambda: moved(layer)(x),
    ):
        try:
            call()
        except (ConfigError, Unsupported) as error:
            said.append(str(error))
    twin = copy.deepcopy(layer)
    assert_same_bits(twin(x), layer(x))
    return said


def moved(layer: RankedLayer) -> RankedLayer:
    twin = copy.deepcopy(layer)
    twin.bank.own.to("meta")
    return twin


def test_refusals(pool):
    for said in pool.run(refused, 2):
        for text, part in zip(
            said,
            (
                "x has 5 tokens and width is 4; allowed: at most width",
                "width was given and tokens are replicated",
                "tokens is 'mine'; allowed: replicated, own",
                "cuts through groups",
                "the partition is of (8, 3)",
                "wire is None; allowed: a RankWire",
                "the bank holds 8 experts; the partition gives rank",
                "a layer over ranks was pickled",
                "the layer was moved to meta; allowed: cpu",
            ),
            strict=True,
        ):
            assert part in text


def failing(ranks: Ranks) -> str:
    """Rank 1 fails while the others wait in `agree`, or at the end of the same work."""
    said = []
    for waits in (True, False):
        try:
            with ranks.together():
                if ranks.rank == 1:
                    raise ValueError("no room here")
                if waits:
                    ranks.agree("a layer", {"k": 1})
        except (RankLost, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}")
    ranks.agree("a layer", {"k": 1})
    return "; ".join(dict.fromkeys(said))


def test_what_fails_on_one_rank_fails_on_all(pool):
    first, second, third = pool.run(failing, 3)
    assert second == "ValueError: no room here"
    assert first == third
    assert first == "RankLost: another rank has failed: rank 1: ValueError: no room here"


def lost_ranks(rank: int) -> list[str]:
    """Rank 1 comes too late, then it hangs, then it dies."""
    first, second, third = (
        Ranks(group=dist.new_group([0, 1, 2], timeout=timedelta(seconds=seconds)))
        for seconds in (2, 2, 60)
    )
    for ranks in (first, second, third):
        ranks.objects(rank)
    if rank == 1:
        time.sleep(3)
        merged(first)
        time.sleep(7)
        os._exit(9)
    found = [merged(group) for group in (first, second, second)]
    start = time.monotonic()
    found.append(merged(third))
    assert time.monotonic() - start < 15
    return found


def merged(ranks: Ranks) -> str:
    try:
        ranks.merge(torch.ones(4, dtype=torch.int32))
    except RankLost as error:
        return str(error)
    return "nothing was said"


@pytest.mark.slow
def test_ranks_that_are_lost_are_named():
    found = on_ranks(lost_ranks, 3)
    assert found[1] is None
    for rank in (0, 2):
        late, hung, later, died = found[rank]
        assert "every rank answers, so one was late, or they have not called the same" in late
        for said in (hung, died):
            assert said.startswith(f"merge failed on rank {rank} of 3 (gloo, cpu): ")
            assert "rank 1 died or does not answer" in said
        assert "lost each other at an earlier merge" in later
