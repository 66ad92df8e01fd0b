"""Ranks over NCCL, a GPU each: bits of one card, eager and captured. gloo tries the code."""

import copy
import os
from collections.abc import Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from torch import Tensor

from exactmoe import Limits, MoEConfig, MoELayer, verify
from exactmoe.parallel.rank_bank import RankBank
from exactmoe.parallel.rank_wire import RankWire
from exactmoe.parallel.ranks import Ranks
from exactmoe.ranked import RankedLayer
from exactmoe.ranked_dense import RankedDense, cuts, own_rows
from layers import CLASSES, assert_same_bits
from rank_processes import on_ranks
from seed_bank import seed_bank, seed_call
from small_layers import small_layer

DEMO = Path(__file__).resolve().parents[2] / "demo"
EXPERTS = 8


@pytest.fixture(params=[pytest.param("nccl", marks=pytest.mark.two_gpu), "gloo"])
def backend(request) -> str:
    return request.param


def device_of(rank: int, backend: str) -> str:
    return f"cuda:{rank}" if backend == "nccl" else "cpu"


def wires(ranks: Ranks, tokens: str) -> Iterator[RankWire]:
    for returns in ("slots", "partials"):
        yield RankWire(ranks, EXPERTS, tokens=tokens, returns=returns)


def layers_of(rank: int, backend: str) -> int:
    """Both classes, tokens and returns; the seed's bank at published sizes on a GPU."""
    device, compared = device_of(rank, backend), 0
    hidden, inner, widths = (4096, 2048, (1, 6, 32, 512, 4096))
    if backend == "gloo":
        hidden, inner, widths = (128, 256, (1, 6, 32))
    ranks = Ranks(device)
    for numerics in CLASSES:
        config = MoEConfig(hidden, inner, EXPERTS, 6, swiglu_limit=6.0, numerics=numerics)
        bank, limits = seed_bank(hidden, inner).to(device), Limits(max_rows=1024)
        whole = MoELayer(config, bank, limits=limits)
        calls = [tuple(t.to(device) for t in seed_call(width, hidden)) for width in widths]
        expected = [whole.experts(*call) for call in calls]
        for wire in wires(ranks, "replicated"):
            layer = RankedLayer(config, copy.deepcopy(bank), wire, limits=limits)
            for call, wanted in zip(calls, expected, strict=True):
                label = f"{numerics} {wire.returns} {len(wanted)}"
                assert_same_bits(layer.experts(*call), wanted, label)
                if backend == "nccl":
                    assert_same_bits(replayed(layer, call), wanted, f"{label}, captured")
                compared += 1
            layer.check()
        for wire in wires(ranks, "own"):
            layer = RankedLayer(config, copy.deepcopy(bank), wire, limits=limits)
            for call, wanted in zip(calls, expected, strict=True):
                count = max(len(wanted) // 3, 1)
                own = slice(0, count) if rank == 0 else slice(count, len(wanted))
                parts = tuple(tensor[own].contiguous() for tensor in call)
                found = layer.experts(*parts, width=len(wanted))
                assert_same_bits(found, wanted[own], f"{numerics} own {wire.returns}")
                compared += 1
    return compared


def replayed(layer: RankedLayer, call: tuple[Tensor, ...]) -> Tensor:
    """What a graph gives that was captured with other inputs; ranks replay in the same order."""
    static = tuple(torch.zeros_like(tensor) for tensor in call)
    stream = torch.cuda.Stream(layer.device)
    stream.wait_stream(torch.cuda.current_stream(layer.device))
    with torch.cuda.stream(stream):
        layer.experts(*static)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        y = layer.experts(*static)
    for given, held in zip(call, static, strict=True):
        held.copy_(given)
    y.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize(layer.device)
    return y.clone()


def test_layers(backend):
    found = on_ranks(layers_of, 2, backend, backend=backend)
    assert found == [2 * 4 * (5 if backend == "nccl" else 3)] * 2


def proof_of(rank: int, backend: str) -> dict[str, int]:
    """verify of a block with a cut shared expert."""
    device = device_of(rank, backend)
    ranks = Ranks(device)
    layer = small_layer(torch.Generator().manual_seed(81)).to(device)
    weights = tuple(layer.shared.bank.weights())
    size = layer.config.hidden_size
    cut = cuts([weight.format for weight in weights], size, size, 2)
    shared = RankedDense(own_rows(weights, cut, rank), cut, ranks, swiglu_limit=10.0)
    bank = RankBank.cut(layer.bank, RankWire(ranks, EXPERTS))
    ranked = RankedLayer(layer.config, bank, router=layer.router, shared=shared)
    few = {"widths": (1, 2, 17), "repeats": 2, "backend_rows": 1}
    asked = ("width", "pieces", "captured", "ranks")
    report = verify(ranked, dimensions=asked, **(few if backend == "gloo" else {}))
    report.raise_on_mismatch()
    return {name: count.comparisons for name, count in report.dimensions.items()}


def test_verify(backend):
    wanted = {"width", "pieces", "ranks"} | ({"captured"} if backend == "nccl" else set())
    for found in on_ranks(proof_of, 2, backend, backend=backend):
        assert set(found) >= wanted


def text_of(rank: int, backend: str, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """New tokens of a demo model over ranks, and in this process alone."""
    from exactmoe.hf import load_model
    from exactmoe.hf.text import generate, load_tokenizer, prompt_ids, quiet

    quiet()
    tokenizer = load_tokenizer(str(DEMO / name))
    ids, device = prompt_ids(tokenizer, "def f(x):\n    return"), device_of(rank, backend)
    found = []
    for ranks in (Ranks(device), None):
        model = load_model(str(DEMO / name), cards=(device,), ranks=ranks, progress=False)
        found.append(generate(model, tokenizer, ids, 24 if backend == "nccl" else 4).token_ids)
    return found[0], found[1]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", ["glm5_next", "deepseek_v4"])
def test_text(backend, name):
    texts = on_ranks(text_of, 2, backend, name, backend=backend)
    assert len({tokens for pair in texts for tokens in pair}) == 1
