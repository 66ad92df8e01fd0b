"""Selection and weights of both routers (contract section 6)."""

import math

import numpy as np
import pytest
import torch

from exactmoe import Numerics, RouterConfig
from exactmoe.reference import hash_router, router, router_logits, routing_weights, select
from layers import assert_same_bits, normal

INF, NAN = float("inf"), float("nan")
PLAIN = Numerics()
LADDER = Numerics(router="bf16_ladder")
SIGMOID = RouterConfig(score="sigmoid")
SOFTPLUS = RouterConfig(score="sqrt_softplus")
CONFIGS = [SIGMOID, SOFTPLUS]


def true_scores(logits: torch.Tensor, score: str) -> torch.Tensor:
    wide = logits.double()
    if score == "sigmoid":
        return torch.sigmoid(wide).float()
    return torch.sqrt(torch.nn.functional.softplus(wide, threshold=1000)).float()


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.score)
@pytest.mark.parametrize("biased", [False, True])
def test_select_takes_the_largest_keys_in_order(config, biased, rng):
    logits = torch.randn(40, 96, generator=rng) * 3
    bias = torch.randn(96, generator=rng) * 0.3 if biased else None
    ids, scores = select(logits, bias, 6, config, PLAIN)
    expected = true_scores(logits, config.score)
    keys = expected if bias is None else expected + bias
    order = keys.sort(dim=-1, descending=True, stable=True).indices[:, :6]
    assert ids.dtype == torch.int32
    assert ids.tolist() == order.tolist()
    assert_same_bits(scores, expected.gather(1, order))


def test_select_ties_go_to_the_lower_id():
    logits = torch.zeros(3, 288)
    logits[1, 100:120] = 1.0  # a tie of 20 across the cut
    logits[2, 287], logits[2, 3] = 2.0, 2.0
    ids, _ = select(logits, None, 8, SIGMOID, PLAIN)
    assert ids.tolist() == [[*range(8)], [*range(100, 108)], [3, 287, 0, 1, 2, 4, 5, 6]]


def test_select_takes_minus_zero_for_zero():
    # Four keys of zero: 0.5 - 0.5, 0 + -0, 0.5 - 0.5, 0 + 0.
    logits = torch.tensor([[0.0, -INF, 0.0, -INF]])
    bias = torch.tensor([-0.5, -0.0, -0.5, 0.0])
    ids, _ = select(logits, bias, 4, SIGMOID, PLAIN)
    assert ids.tolist() == [[0, 1, 2, 3]]


def test_select_puts_nan_last_and_keeps_ids_distinct():
    logits = torch.linspace(-1, 1, 288).repeat(5, 1)
    logits[1] = NAN
    logits[2, 287] = NAN
    logits[3] = -INF
    logits[4, 3:] = NAN
    ids, scores = select(logits, None, 8, SIGMOID, PLAIN)
    assert ids[0].tolist() == [*range(287, 279, -1)]
    assert ids[1].tolist() == [*range(8)]
    assert ids[2].tolist() == [*range(286, 278, -1)]
    assert ids[3].tolist() == [*range(8)]
    assert ids[4].tolist() == [2, 1, 0, 3, 4, 5, 6, 7]
    assert scores[1].isnan().all() and not scores[[0, 2, 3]].isnan().any()
    alone = select(logits[:1], None, 8, SIGMOID, PLAIN)
    assert_same_bits(ids[:1], alone[0])
    assert_same_bits(scores[:1], alone[1])


def test_select_orders_infinite_keys():
    logits = torch.zeros(1, 5)
    bias = torch.tensor([0.0, -INF, INF, 1.0, NAN])
    ids, scores = select(logits, bias, 5, SIGMOID, PLAIN)
    assert ids.tolist() == [[2, 3, 0, 1, 4]]
    assert scores.tolist() == [[0.5] * 5]


def test_bias_chooses_but_does_not_weigh():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    bias = torch.tensor([0.0, 0.0, 5.0, 4.0])
    ids, scores = select(logits, bias, 2, SIGMOID, PLAIN)
    assert ids.tolist() == [[2, 3]]
    sigmoid = [np.float32(0.5), np.float32(1 / (1 + math.e))]
    assert scores.tolist() == [[float(s) for s in sigmoid]]
    total = np.float32(sigmoid[0] + sigmoid[1])
    weights = routing_weights(scores, SIGMOID, PLAIN)
    assert weights.tolist() == [[float(s / total) for s in sigmoid]]


@pytest.mark.parametrize("factor", [1.0, 2.5, 1.5])
@pytest.mark.parametrize("normalize", [True, False])
def test_weights_by_the_scalar_rule(factor, normalize, rng):
    config = RouterConfig(score="sigmoid", factor=factor, normalize=normalize)
    scores = torch.rand(50, 8, generator=rng)
    scores[0] = 0.0
    expected = torch.empty_like(scores)
    for t, row in enumerate(scores.numpy()):
        total = np.float32(0)
        for s in row:
            total = np.float32(total + s)
        total = np.float32(total + np.float32(1e-20))
        for k, s in enumerate(row):
            share = np.float32(s / total) if normalize else s
            expected[t, k] = float(np.float32(share * np.float32(factor)))
    assert_same_bits(routing_weights(scores, config, PLAIN), expected)


def test_sum_of_weights_goes_in_selection_order():
    scores = torch.tensor([[2.0**24, 1.0, 1.0], [1.0, 1.0, 2.0**24]])
    found = routing_weights(scores, SIGMOID, PLAIN)
    lost, kept = np.float32(2.0**24), np.float32(2.0**24 + 2)
    assert found[0, 1] == float(np.float32(1) / lost)
    assert found[1, 1] == float(np.float32(1) / kept)


def test_selected_nan_gives_nan_weights_to_its_token_only():
    scores = torch.tensor([[0.5, NAN], [0.25, 0.25]])
    found = routing_weights(scores, SIGMOID, PLAIN)
    assert found[0].view(torch.int32).tolist() == [0x7FC00000] * 2
    assert found[1].tolist() == [0.5, 0.5]
    kept = routing_weights(scores, RouterConfig(score="sigmoid", normalize=False), PLAIN)
    assert kept[0, 0] == 0.5 and kept[0, 1].isnan()


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.score)
def test_router_is_logits_then_select_then_weights(weight_dtype, config, rng):
    x, weight = normal(rng, 9, 272), torch.randn(32, 272, generator=rng).to(weight_dtype) / 16
    bias = torch.randn(32, generator=rng)
    ids, weights = router(x, weight, bias, config, 4, PLAIN)
    logits = router_logits(x, weight)
    truth = x.double() @ weight.double().T
    assert float((logits.double() - truth).norm() / truth.norm()) < 2.0**-20
    expected_ids, scores = select(logits, bias, 4, config, PLAIN)
    assert_same_bits(ids, expected_ids)
    assert_same_bits(weights, routing_weights(scores, config, PLAIN))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.score)
def test_hash_router_keeps_the_order_of_the_table(config, rng):
    x, weight = normal(rng, 4, 32), normal(rng, 16, 32)
    table = torch.tensor([[3, 9, 1], [15, 0, 7], [2, 2, 5]])
    token_ids = torch.tensor([2, 0, 1, 0])
    ids, weights = hash_router(x, weight, table, token_ids, config, PLAIN)
    assert ids.dtype == torch.int32
    assert ids.tolist() == [[2, 2, 5], [3, 9, 1], [15, 0, 7], [3, 9, 1]]
    scores = true_scores(router_logits(x, weight), config.score).gather(1, ids.long())
    assert_same_bits(weights, routing_weights(scores, config, PLAIN))
    # Reversed rows are summed the other way: the same weights up to their last bits.
    back = hash_router(x, weight, table.flip(1), token_ids, config, PLAIN)[1].flip(1)
    torch.testing.assert_close(back, weights)


def test_bf16_ladder_rounds_every_rung_and_selects_others():
    step = 2.0**-8  # a bf16 step at a score in [0.5, 1)
    logits = torch.tensor([[0.0, 0.001, 0.002, -3.0]])
    assert select(logits, None, 2, SIGMOID, PLAIN)[0].tolist() == [[2, 1]]
    ids, scores = select(logits, None, 2, SIGMOID, LADDER)
    assert ids.tolist() == [[0, 1]]
    assert scores.tolist() == [[0.5, 0.5]]
    bias = torch.tensor([0.0, 0.0, 0.0, 7.0 + step])
    _, scores = select(logits, bias, 1, SIGMOID, LADDER)
    assert_same_bits(scores, true_scores(logits[:, 3:], "sigmoid").bfloat16().float())
    scores = torch.tensor([[1.0, step / 2, step / 2]])  # each is lost in the running bf16 sum
    weights = routing_weights(scores, RouterConfig(score="sigmoid", factor=2.5), LADDER)
    assert weights.tolist() == [[2.5, 2.5 * step / 2, 2.5 * step / 2]]
    plain = routing_weights(scores, RouterConfig(score="sigmoid", factor=2.5), PLAIN)
    assert plain[0, 0] == float(np.float32(np.float32(1 / np.float32(1 + step)) * np.float32(2.5)))


def test_router_nothing_to_route():
    ids, weights = router(
        torch.zeros(0, 32).bfloat16(), torch.zeros(16, 32), None, SIGMOID, 4, PLAIN
    )
    assert ids.shape == weights.shape == (0, 4)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
