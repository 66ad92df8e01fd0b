"""One MoE block over ranks against the same block on one card: bits first, then microseconds.

    torchrun --standalone --nproc-per-node 2 benchmarks/ranks.py --shape glm --device cuda
    torchrun --standalone --nproc-per-node 2 benchmarks/ranks.py --shape small --device cpu

On a GPU each call is captured in a CUDA graph and all ranks replay it together. "idle wire" is the
same layer when the collectives are left out: what is left for the wire is the difference.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from exactmoe import Limits, MoELayer
from exactmoe.bench.problem import draw_dense, draw_problem, draw_router
from exactmoe.bench.shapes import parse_shape
from exactmoe.parallel.rank_bank import RankBank
from exactmoe.parallel.rank_wire import RankWire
from exactmoe.parallel.ranks import Ranks
from exactmoe.proof.machine import fingerprint
from exactmoe.ranked import RankedLayer
from exactmoe.ranked_dense import RankedDense, cuts, own_rows

SAMPLES = 30


class NoWire(Ranks):
    """Ranks that send nothing in calls: times what is not the wire. Its results are wrong."""

    def all_gather(self, mine: Tensor, everyone: Tensor) -> None:
        pass

    def merge(self, words: Tensor) -> None:
        pass


def layers(ranks: Ranks, shape: object, numerics: str, limits: Limits) -> dict[str, MoELayer]:
    """By what is timed. Every rank draws the same weights."""
    generator = torch.Generator(ranks.device).manual_seed(1)
    problem = draw_problem(shape, shape.format, ranks.device, generator)
    router = draw_router(shape, ranks.device, generator)
    shared = draw_dense(shape, shape.shared_size, ranks.device, generator, "auto")
    weights = tuple(shared.bank.weights())
    formats = [weight.format for weight in weights]
    cut = cuts(formats, shape.hidden_size, shape.shared_size, ranks.size)
    config = shape.config(numerics)
    made = {"one card": MoELayer(config, problem.bank(), router, shared, limits=limits)}

    def over(group: Ranks, returns: str, cut_dense: bool) -> RankedLayer:
        wire = RankWire(group, shape.num_experts, returns=returns)
        dense = shared
        if cut_dense and cut is not None:
            own = own_rows(weights, cut, group.rank)
            dense = RankedDense(own, cut, group, shape.swiglu_limit, limits)
        bank = RankBank.cut(problem.bank(), wire)
        return RankedLayer(config, bank, None, router, dense, limits)

    for returns in ("partials", "slots"):
        if returns == "slots" or RankWire(ranks, shape.num_experts).partition.is_aligned:
            made[f"{returns}, shared cut"] = over(ranks, returns, True)
            made[f"{returns}, shared whole"] = over(ranks, returns, False)
    made["idle wire, shared cut"] = over(NoWire(ranks.device, ranks.group), "auto", True)
    return made


def microseconds(layer: MoELayer, x: Tensor, ranks: Ranks) -> float:
    """The median of one call; all ranks call together."""
    call: Callable[[], object] = lambda: layer(x)  # noqa: E731
    layer(x)
    if ranks.device.type == "cuda":
        stream = torch.cuda.Stream(ranks.device)
        stream.wait_stream(torch.cuda.current_stream(ranks.device))
        with torch.cuda.stream(stream):
            layer(x)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            layer(x)
        call = graph.replay
    samples = []
    for _ in range(SAMPLES):
        ranks.objects(None)  # all begin together
        if ranks.device.type == "cuda":
            torch.cuda.synchronize(ranks.device)
        start = time.perf_counter()
        call()
        if ranks.device.type == "cuda":
            torch.cuda.synchronize(ranks.device)
        samples.append((time.perf_counter() - start) * 1e6)
    return statistics.median(samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="glm")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--numerics", default="a16", choices=("a16", "a8"))
    parser.add_argument("--rows", default="1,8,64,512")
    asked = parser.parse_args()
    ranks, shape = Ranks.auto(asked.device), parse_shape(asked.shape)
    widths = [int(rows) for rows in asked.rows.split(",")]
    made = layers(ranks, shape, asked.numerics, Limits(max_rows=max(widths)))
    generator = torch.Generator(ranks.device).manual_seed(2)
    found: dict[str, dict[int, float]] = {}
    for width in widths:
        x = torch.randn(width, shape.hidden_size, device=ranks.device, generator=generator)
        x = x.bfloat16()
        expected = made["one card"](x)
        for name, layer in made.items():
            equal = torch.equal(layer(x).view(torch.int16), expected.view(torch.int16))
            if not equal and "idle" not in name:
                raise SystemExit(f"{name}, {width} rows: bits differ from one card")
            found.setdefault(name, {})[width] = round(microseconds(layer, x, ranks), 1)
    if ranks.rank == 0:
        facts = {"ranks": ranks.size, "backend": ranks.backend, **vars(asked)}
        print(json.dumps({**facts, "microseconds": found, "machine": fingerprint(ranks.device)}))


if __name__ == "__main__":
    main()
