"""Field faults of ids, selection and weights: A13 to A18."""

import numpy as np
import pytest
import torch

from exactmoe import DenseMLP, Limits, MoEConfig, MoELayer, Router, RouterConfig
from exactmoe.errors import ConfigError
from layers import (
    BACKENDS,
    CLASSES,
    assert_same_bits,
    first_column,
    layer_of,
    normal,
    repeating_table,
    routed,
    switch_bank,
)

SIGMOID = RouterConfig(score="sigmoid")


def powers_layer(
    backend: str, num_experts: int, top_k: int, size: int = 32, **settings
) -> MoELayer:
    """Expert e gives 2^e in every element for x = (1, 0, ...): a sum says who was in it."""
    up = torch.zeros(num_experts, size)
    up[:, 0] = 1.0
    down = torch.zeros(num_experts, size, size)
    down[:, :, 0] = 1.0
    bank = switch_bank("mxfp4", up, down, [e - 5 for e in range(num_experts)])
    return layer_of(bank, top_k, backend, **settings)


def selecting_layer(backend: str, router: Router, top_k: int) -> MoELayer:
    """A layer whose router alone matters: 16 wide, no bytes to speak of."""
    experts, hidden = router.num_experts, router.hidden_size
    bank = switch_bank("nvfp4", torch.zeros(experts, 16), torch.zeros(experts, hidden, 16))
    return layer_of(bank, top_k, backend, router=router)


def scores(logits: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(logits.double()).float()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("numerics", CLASSES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a13_negative_ids_and_duplicates(dtype, numerics, backend):
    layer = powers_layer(backend, 8, 2, 128, numerics=numerics)
    ids = torch.tensor([[0, 7], [-1, 3], [-1, -1], [4, 4], [7, -1], [-2, 5], [-(2**31), 6]])
    weights = torch.tensor([[1.0, 1.0]] * 3 + [[1.0, 0.5]] + [[1.0, 1.0]] * 3)
    y = layer.experts(first_column(7, 128), ids.to(dtype), weights)
    expected = torch.tensor([1 + 128, 8, 0, 16 + 8, 128, 32, 64.0]).bfloat16()
    assert_same_bits(y, expected[:, None].expand(7, 128))
    layer.check()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [8, 1000, 2**31 - 1, 2**32 + 3])
def test_a13_ids_that_no_expert_has(bad, backend):
    layer = powers_layer(backend, 8, 2)
    ids = torch.tensor([[bad, 3], [2, bad]])
    ids = ids if bad >= 2**31 else ids.int()
    y = layer.experts(first_column(2, 32), ids, torch.ones(2, 2))
    assert_same_bits(y, torch.tensor([[8.0], [4.0]]).bfloat16().expand(2, 32))
    with pytest.raises(ConfigError, match="num_experts = 8"):
        layer.check()
    strict = powers_layer(backend, 8, 2, limits=Limits(checks=True))
    with pytest.raises(ConfigError, match="num_experts = 8"):
        strict.experts(first_column(2, 32), ids, torch.ones(2, 2))


def nan_router() -> tuple[Router, torch.Tensor]:
    """x of 4 tokens: normal logits, all NaN, one NaN at expert 17, all -Inf."""
    huge = torch.finfo(torch.bfloat16).max
    weight = torch.zeros(288, 32)
    weight[:, 0] = torch.arange(288) / 64 - 2
    weight[17, 1], weight[17, 2] = huge, -huge
    weight[:, 3] = -huge
    x = torch.zeros(4, 32)
    x[:3, 0] = 1.0
    x[1, 9] = float("nan")
    x[2, 1] = x[2, 2] = huge
    x[3, 3] = huge
    return Router(weight.bfloat16(), config=SIGMOID), x.bfloat16()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a14_nan_and_infinite_logits_give_distinct_ids_in_range(backend):
    router, x = nan_router()
    layer = selecting_layer(backend, router, 8)
    ids, weights = routed(layer, x)
    keys = scores(router.weight[:, 0].float())
    order = keys.sort(descending=True, stable=True).indices[:8].tolist()
    assert ids[0].tolist() == ids[2].tolist() == order
    assert 17 not in ids[2].tolist()
    assert ids[1].tolist() == ids[3].tolist() == [*range(8)]
    assert weights[1].isnan().all()
    assert not weights[[0, 2]].isnan().any()
    assert weights[3].tolist() == [0.0] * 8
    assert_same_bits(ids[:1], routed(layer, x[:1])[0])
    assert_same_bits(weights[:1], routed(layer, x[:1])[1])
    layer(x)
    layer.check()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a14_a_nan_that_must_be_selected_stays_in_its_token(backend):
    router, x = nan_router()
    few = Router(router.weight[16:20], config=SIGMOID)
    small = selecting_layer(backend, few, 4)
    ids, weights = routed(small, x)
    assert ids[0].tolist() == [3, 2, 1, 0]
    assert ids[2].tolist() == [3, 2, 0, 1]  # the NaN last
    assert weights[[1, 2]].isnan().all() and not weights[[0, 3]].isnan().any()


TIE_WIDTHS = {"reference": (1, 3, 17), "cpu": (1, 2, 3, 5, 8, 9, 16, 31, 64, 129, 257, 1000)}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a15_ties_go_to_the_lower_id_at_every_width(backend, rng):
    weight = torch.randint(-1, 2, (288, 32), generator=rng).bfloat16()
    weight[100:120] = weight[100]
    layer = selecting_layer(backend, Router(weight, config=SIGMOID), 8)
    widths = TIE_WIDTHS[backend]
    x = torch.randint(-1, 2, (max(widths), 32), generator=rng).bfloat16()
    x[0] = 0.0
    logits = x.double() @ weight.double().T  # small integers: exact, with many ties
    order = scores(logits).sort(dim=-1, descending=True, stable=True).indices[:, :8].int()
    assert order[0].tolist() == [*range(8)]
    for width in widths:
        assert_same_bits(routed(layer, x[:width])[0], order[:width])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a16_the_bias_is_not_narrowed_and_not_in_the_weights(backend, rng):
    weight = torch.randint(-8, 9, (288, 32), generator=rng) / 16
    x = torch.randint(-2, 3, (24, 32), generator=rng).bfloat16()
    bias = torch.linspace(6.817, 7.063, 288)[torch.randperm(288, generator=rng)]
    assert len(bias.bfloat16().unique()) < 12
    router = Router(weight.bfloat16(), bias, config=RouterConfig(score="sigmoid", factor=2.5))
    layer = selecting_layer(backend, router, 8)
    own = scores(x.double() @ weight.double().T)
    order = (own + bias).sort(dim=-1, descending=True, stable=True).indices[:, :8]
    narrow = (own + bias.bfloat16()).sort(dim=-1, descending=True, stable=True).indices[:, :8]
    assert int((order != narrow).any(-1).sum()) > 20
    expected = torch.empty(24, 8)
    for t, row in enumerate(own.gather(1, order).numpy()):
        total = np.float32(0)
        for s in row:
            total = np.float32(total + s)
        for k, s in enumerate(row):
            expected[t, k] = float(np.float32(np.float32(s / total) * np.float32(2.5)))
    for moved in (layer, layer.to(torch.bfloat16), torch.nn.Sequential(layer).half()[0]):
        assert moved.router.bias.dtype == torch.float32
        ids, weights = routed(moved, x)
        assert_same_bits(ids, order.int())
        assert_same_bits(weights, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_experts", [256, 257, 288, 384, 512, 896, 1024])
def test_a17_the_last_experts_are_chosen(num_experts, backend):
    for top_k in (1, 2, 6, 8, 10, 16):
        weight = torch.zeros(num_experts, 32)
        weight[num_experts - top_k :, 0] = 1 + torch.arange(top_k) / 8
        router = Router(weight.bfloat16(), config=SIGMOID)
        layer = selecting_layer(backend, router, top_k)
        ids, _ = routed(layer, first_column(2, 32))
        assert ids.tolist() == [[*range(num_experts - 1, num_experts - 1 - top_k, -1)]] * 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_a17_the_last_expert_is_computed(backend):
    up = torch.zeros(896, 16)
    up[:, 0] = 1.0
    down = torch.zeros(896, 32, 16)
    down[895, :, 0] = 1.0  # all others give zero
    weight = torch.zeros(896, 32)
    weight[895, 0] = 1.0
    layer = layer_of(
        switch_bank("nvfp4", up, down), 1, backend, router=Router(weight, config=SIGMOID)
    )
    assert_same_bits(layer(first_column(2, 32)), torch.full((2, 32), 32.0).bfloat16())


def test_a17_more_experts_than_supported_are_refused():
    with pytest.raises(
        ConfigError, match="num_experts is 1025; allowed: an integer from 1 to 1024"
    ):
        MoEConfig(hidden_size=32, intermediate_size=32, num_experts=1025, top_k=8)
    with pytest.raises(ConfigError, match="top_k is 65; allowed: an integer from 1 to 64"):
        MoEConfig(hidden_size=32, intermediate_size=32, num_experts=288, top_k=65)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("numerics", CLASSES)
def test_a18_the_factor_is_applied_once(numerics, backend):
    """Expert output 32, shared expert 0, factor 2.5: y = 80."""
    size = 128
    up, down = torch.zeros(2, size), torch.zeros(2, size, size)
    up[:, 0], down[:, :, 0] = 1.0, 1.0
    zero = torch.zeros(size, size).bfloat16()
    router = Router(
        normal(torch.Generator().manual_seed(1), 2, size), config=RouterConfig("sigmoid", 2.5)
    )
    layer = layer_of(
        switch_bank("nvfp4", up, down),
        1,
        backend,
        numerics=numerics,
        router=router,
        shared=DenseMLP(zero, zero, zero, backend=backend),
    )
    assert_same_bits(layer(first_column(2, size)), torch.full((2, size), 80.0).bfloat16())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("score", "top_k", "factor"), [("sigmoid", 8, 2.5), ("sqrt_softplus", 6, 1.5)]
)
def test_a18_weights_add_up_to_the_factor(score, top_k, factor, backend, rng):
    config = RouterConfig(score=score, factor=factor)
    router = Router(normal(rng, 64, 32), torch.randn(64, generator=rng), config=config)
    _, weights = routed(selecting_layer(backend, router, top_k), normal(rng, 20, 32))
    sums = weights.double().sum(-1)
    assert float((sums - factor).abs().max()) <= (top_k + 1) * 2.0**-24 * factor
    single = Router(router.weight, router.bias, config=config)
    _, weights = routed(selecting_layer(backend, single, 1), normal(rng, 20, 32))
    assert_same_bits(weights, torch.full((20, 1), factor))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a18_a_hash_layer_takes_ids_from_the_table_and_weights_from_the_scores(backend, rng):
    table = torch.stack([torch.randperm(16, generator=rng)[:4] for _ in range(40)])
    config = RouterConfig(score="sqrt_softplus", factor=1.5)
    weight = torch.randint(-8, 9, (16, 32), generator=rng) / 16
    layer = selecting_layer(backend, Router(weight.bfloat16(), table=table, config=config), 4)
    x, tokens = (
        torch.randint(-2, 3, (9, 32), generator=rng).bfloat16(),
        torch.randint(40, (9,), generator=rng),
    )
    ids, weights = routed(layer, x, tokens)
    assert_same_bits(ids, table[tokens].int())
    logits = x.double() @ weight.double().T
    own = torch.sqrt(torch.nn.functional.softplus(logits, threshold=1000)).float()
    gathered = own.gather(1, ids.long())
    total = torch.zeros(9)
    for k in range(4):
        total = total + gathered[:, k]
    assert_same_bits(weights, gathered / total[:, None] * 1.5)


@pytest.mark.parametrize("numerics", CLASSES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a13_a_table_may_repeat_an_id(backend, numerics):
    """Both slots count, each with its weight."""
    layer, x, tokens, expected = repeating_table(numerics, backend)
    ids, weights = routed(layer, x, tokens)
    assert ids.tolist() == [[0, 1], [0, 0], [1, 1], [1, 0], [0, 0]]
    assert_same_bits(weights, torch.full((5, 2), 0.75))
    assert_same_bits(layer(x, tokens), expected)
    assert_same_bits(layer.experts(x, ids, weights), expected)
