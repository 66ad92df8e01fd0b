"""Field fault A30: no width costs much more than the one before it; few rows cost their experts.

Times are medians of graph replays that rotate over fresh routings, so that the L2 cache does not
hold the next call's weights.
"""

from statistics import median

import pytest
import torch

from exactmoe import MoELayer
from gpu_layers import Layer, call

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

ROUTINGS, REPEATS = 6, 15
EDGES = (
    *range(1, 36),
    47,
    48,
    49,
    63,
    64,
    65,
    66,
    95,
    96,
    97,
    127,
    128,
    129,
    191,
    192,
    193,
    255,
    256,
)


@pytest.fixture(scope="module")
def layer() -> MoELayer:
    settings = Layer(hidden=4096, inner=2048, experts=96, top_k=8, shared=None)
    return settings.build("cuda")


def cost(layer: MoELayer, tokens: int) -> tuple[float, float]:
    """Microseconds of one call, and the mean number of distinct experts."""
    calls = [call(layer, tokens, seed) for seed in range(ROUTINGS)]
    layer.experts(*calls[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for inputs in calls:
            layer.experts(*inputs)
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / ROUTINGS)
    distinct = sum(len(ids.unique()) for _, ids, _ in calls) / ROUTINGS
    return median(times[3:]), distinct


def test_no_cliff_from_one_width_to_the_next(layer):
    costs = {tokens: cost(layer, tokens) for tokens in EDGES}
    wrong = []
    for tokens, (time, distinct) in costs.items():
        if tokens + 1 not in costs:
            continue
        next_time, next_distinct = costs[tokens + 1]
        allowed = 1.25 * time * max(1.0, next_distinct / distinct)
        if next_time > allowed:
            wrong.append(f"{tokens} -> {tokens + 1}: {time:.1f} -> {next_time:.1f} us")
    assert not wrong, "; ".join(wrong)


def test_two_to_eight_rows_cost_their_experts(layer):
    alone, _ = cost(layer, 1)
    wrong = []
    for tokens in range(2, 9):
        time, distinct = cost(layer, tokens)
        allowed = 1.15 * distinct / 8 * alone
        if time > allowed:
            wrong.append(f"{tokens} rows: {time:.1f} us, allowed {allowed:.1f}")
    assert not wrong, "; ".join(wrong)
