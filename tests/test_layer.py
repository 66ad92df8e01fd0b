"""MoELayer and DenseMLP: what a call accepts, what it gives back, and what it leaves alone."""

import itertools
import json

import pytest
import torch

from exactmoe import DenseMLP, Limits, MoEConfig, MoELayer, Router, RouterConfig, ops
from exactmoe.errors import ConfigError, Unsupported
from exactmoe.formats.rows import Rows
from exactmoe.runtime.routes import RouteTable
from layers import (
    BACKENDS,
    CLASSES,
    FORMATS,
    assert_same_bits,
    layer_of,
    normal,
    random_bank,
    random_call,
    relative_l2,
    routed,
    true_experts,
)

INT_MIN = -(2**31)


def small(rng, backend="cpu", numerics="a16", **settings) -> MoELayer:
    """8 experts, top 3, H = I = 128."""
    bank = random_bank(rng, "mxfp4", 8, 128, 128)
    return layer_of(bank, 3, backend, numerics=numerics, **settings)


def whole(rng, backend="cpu", numerics="a16", hashed=False, **settings) -> MoELayer:
    """The same with a router (or a hash router) and a shared expert."""
    table = torch.randint(8, (50, 3), generator=rng) if hashed else None
    router = Router(
        normal(rng, 8, 128),
        None if hashed else torch.randn(8, generator=rng),
        table,
        config=RouterConfig(score="sqrt_softplus", factor=1.5),
    )
    sizes = ((64, 128), (64, 128), (128, 64))
    shared = DenseMLP(*(normal(rng, *size, scale=0.1) for size in sizes), 10.0, backend=backend)
    return small(rng, backend, numerics, router=router, shared=shared, **settings)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("numerics", CLASSES)
def test_both_backends_give_the_same_bits(format, numerics, rng):
    bank = random_bank(rng, format, 6, 128, 256)
    layers = [layer_of(bank, 2, b, numerics=numerics, swiglu_limit=1.0) for b in BACKENDS]
    call = random_call(rng, layers[0], 17)
    slow, fast = (layer.experts(*call) for layer in layers)
    assert_same_bits(fast, slow)
    truth = true_experts(bank, *call, limit=1.0)
    assert relative_l2(fast, truth) < (2.0**-7 if numerics == "a16" else 0.08)


def test_both_backends_give_the_same_float32_activation(rng):
    """h of `a8` before its rounding, whose last bits no later stage shows."""
    bank = random_bank(rng, "mxfp4", 1, 128, 256)
    x = normal(rng, 64, 128, scale=4.0).float()
    routes = RouteTable(torch.tensor([0, 64]), torch.arange(64), torch.zeros(1).long())
    results = []
    for backend in BACKENDS:
        path = ops.path(backend)
        rows = path.quantize(x, Rows(torch.empty(64, 128), torch.empty(64, 1)))
        weights = path.prepare(bank.gate), path.prepare(bank.up)
        h = torch.empty(64, 256)
        path.gate_up(rows, weights, routes, torch.full((64, 1), 0.7), None, h)
        results.append(h)
    assert_same_bits(*results)


@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize("numerics", CLASSES)
def test_both_backends_give_the_same_block(hashed, numerics, rng):
    fast = whole(rng, "cpu", numerics, hashed)
    slow = MoELayer(fast.config, fast.bank, fast.router, fast.shared, backend="reference")
    x, tokens = normal(rng, 13, 128), torch.randint(50, (13,), generator=rng)
    assert_same_bits(fast(x, tokens), slow(x, tokens))


@pytest.mark.parametrize("backend", BACKENDS)
def test_forward_without_shared_is_experts_fed_by_the_router(backend, rng):
    layer = whole(rng, backend)
    layer.shared = None
    x = normal(rng, 9, 128)
    ids, weights = routed(layer, x)
    assert_same_bits(layer(x), layer.experts(x, ids, weights))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("output", ["bf16", "f32"])
def test_the_shared_expert_is_added_before_the_one_rounding(backend, output, rng):
    layer = whole(rng, backend)
    config = layer.config.with_numerics({"output": "f32"})
    routed = MoELayer(config, layer.bank, layer.router, backend=backend)
    parts = (layer.shared.bank.gate, layer.shared.bank.up, layer.shared.bank.down)
    dense = DenseMLP(*parts, 10.0, backend=backend, output="f32")
    x = normal(rng, 9, 128)
    expected = routed(x) + dense(x)
    block = MoELayer(
        layer.config.with_numerics({"output": output}), layer.bank, layer.router, layer.shared
    )
    assert_same_bits(block(x), expected.bfloat16() if output == "bf16" else expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("numerics", CLASSES)
def test_no_tokens_and_one(backend, numerics, rng):
    layer = whole(rng, backend, numerics)
    x, ids, weights = random_call(rng, layer, 4)
    nothing = layer.experts(x[:0], ids[:0], weights[:0])
    assert nothing.shape == (0, 128) and nothing.dtype == torch.bfloat16
    assert layer(x[:0]).shape == layer.shared(x[:0]).shape == (0, 128)
    assert_same_bits(
        layer.experts(x[2:3], ids[2:3], weights[2:3]), layer.experts(x, ids, weights)[2:3]
    )
    assert_same_bits(layer(x[2:3]), layer(x)[2:3])
    assert_same_bits(layer.shared(x[2:3]), layer.shared(x)[2:3])


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_slots(backend, rng):
    layer = small(rng, backend)
    x = normal(rng, 5, 128)
    y = layer.experts(x, torch.zeros(5, 0).int(), torch.zeros(5, 0))
    assert_same_bits(y, torch.zeros(5, 128).bfloat16())


def test_65600_tokens_are_the_calls_of_4096_one_after_the_other(rng):
    bank = random_bank(rng, "nvfp4", 16, 256, 16)
    layer = layer_of(bank, 2, "cpu")
    x, ids, weights = random_call(rng, layer, 65_600)
    pieces = [
        layer.experts(*(part[start : start + 4096] for part in (x, ids, weights)))
        for start in range(0, 65_600, 4096)
    ]
    assert_same_bits(layer.experts(x, ids, weights), torch.cat(pieces))


@pytest.mark.parametrize("backend", BACKENDS)
def test_fewer_slots_than_top_k_are_absent_slots(backend, rng):
    layer = small(rng, backend)
    x, ids, weights = random_call(rng, layer, 5)
    absent = ids.clone()
    absent[:, 2] = -1
    assert_same_bits(
        layer.experts(x, ids[:, :2], weights[:, :2]), layer.experts(x, absent, weights)
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("numerics", CLASSES)
def test_int64_ids_and_strided_views_give_the_same_bits(backend, numerics, rng):
    layer = small(rng, backend, numerics)
    x, ids, weights = random_call(rng, layer, 6)
    expected = layer.experts(x, ids, weights)
    assert_same_bits(layer.experts(x, ids.long(), weights), expected)
    wide_x = torch.stack([x, torch.full_like(x, float("nan"))], 1)[:, 0]
    wide_ids = torch.stack([ids.long(), torch.full_like(ids.long(), 99)], -1)[..., 0]
    wide_weights = torch.stack([weights, torch.full_like(weights, 7.0)], -1)[..., 0]
    assert not (wide_x.is_contiguous() or wide_ids.is_contiguous() or wide_weights.is_contiguous())
    assert_same_bits(layer.experts(wide_x, wide_ids, wide_weights), expected)
    assert_same_bits(layer.experts(x.T.contiguous().T, ids.T.contiguous().T, weights), expected)
    same_x, same_ids = x[:1].expand(6, 128), ids[:1].expand(6, 3)
    found = layer.experts(same_x, same_ids, weights[:1].expand(6, 3))
    assert_same_bits(found, expected[:1].expand(6, 128))
    block = whole(rng, backend, numerics)
    assert_same_bits(block(wide_x), block(x))
    assert_same_bits(block.shared(wide_x), block.shared(x))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_below_zero_are_absent(backend, dtype, rng):
    layer = small(rng, backend, limits=Limits(checks=True))
    x, ids, weights = random_call(rng, layer, 5)
    ids = ids.to(dtype)
    ids[1, 0], ids[2, 1], ids[3] = -1, -2, INT_MIN
    weights[1, 0] = weights[3, 0] = float("nan")
    found = layer.experts(x, ids, weights)
    assert_same_bits(found[:1], layer.experts(x[:1], ids[:1], weights[:1]))
    assert_same_bits(found[1:2], layer.experts(x[1:2], ids[1:2, 1:], weights[1:2, 1:]))
    assert_same_bits(found[3], torch.zeros(128).bfloat16())
    layer.check()


BEYOND = [8, 9, 1000, 2**31 - 1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [*BEYOND, 2**31, 2**32 + 1, 2**63 - 1])
def test_ids_of_no_expert_are_absent_and_raise_at_the_check(backend, bad, rng):
    layer = small(rng, backend)
    x, ids, weights = random_call(rng, layer, 3)
    ids = ids.long() if bad >= 2**31 else ids
    absent = ids.clone()
    ids[1, 1], absent[1, 1] = bad, -1
    found = layer.experts(x, ids, weights)
    with pytest.raises(ConfigError, match="num_experts = 8"):
        layer.check()
    layer.check()  # raised once
    assert_same_bits(found, layer.experts(x, absent, weights))
    layer.check()
    strict = MoELayer(layer.config, layer.bank, limits=Limits(checks=True), backend=backend)
    with pytest.raises(ConfigError, match="num_experts = 8"):
        strict.experts(x, ids, weights)
    assert_same_bits(strict.experts(x, absent, weights), found)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_id_of_no_expert_in_one_piece_of_many_is_still_seen(backend, rng):
    layer = small(rng, backend, limits=Limits(max_rows=2))
    x, ids, weights = random_call(rng, layer, 7)
    ids[1, 0] = 8
    layer.experts(x, ids, weights)
    with pytest.raises(ConfigError):
        layer.check()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("numerics", CLASSES)
def test_order_of_the_pairs_does_not_matter(backend, numerics, rng):
    layer = small(rng, backend, numerics)
    x, ids, weights = random_call(rng, layer, 4)
    ids[0] = torch.tensor([5, 5, 2])  # duplicates add both weights
    ids[1] = torch.tensor([7, 7, 7])
    expected = layer.experts(x, ids, weights)
    for order in itertools.permutations(range(3)):
        assert_same_bits(layer.experts(x, ids[:, order], weights[:, order]), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("numerics", CLASSES)
def test_inputs_are_not_written_and_y_shares_no_memory(backend, numerics, rng):
    layer = whole(rng, backend, numerics, limits=Limits(max_rows=3))
    x, ids, weights = random_call(rng, layer, 7)
    kept = [t.clone() for t in (x, ids, weights)]
    state = {name: t.clone() for name, t in layer.state_dict().items()}
    results = [layer.experts(x, ids, weights), layer(x), layer.shared(x), layer(x)]
    copies = [y.clone() for y in results]
    layer(normal(rng, 7, 128))
    for found, before in zip((x, ids, weights, *results), (*kept, *copies), strict=True):
        assert_same_bits(found, before)
    for name, tensor in layer.state_dict().items():
        assert_same_bits(tensor, state[name])
    places = {y.untyped_storage().data_ptr() for y in results}
    assert len(places) == len(results)
    assert all(y.untyped_storage().nbytes() == y.nbytes for y in results)


def test_tokens_a_piece_follow_the_device_until_they_are_named(rng, monkeypatch):
    layers = [small(rng, "cpu"), small(rng, "cpu", limits=Limits(checks=True))]
    named = small(rng, "cpu", limits=Limits(max_rows=512))
    for layer in (*layers, named):
        assert layer.limits.max_rows == layer.explain().max_rows == 512
        assert "at most 512 a piece" in str(layer.explain())
    card = property(lambda self: torch.device("cuda", 0))
    with monkeypatch.context() as moved:
        moved.setattr(MoELayer, "device", card)
        assert [layer.limits.max_rows for layer in layers] == [4096, 4096]
        assert layers[1].limits == Limits(max_rows=4096, checks=True)
        assert named.limits == Limits(max_rows=512)
    layers[1].reserve(7)
    assert layers[1].limits == Limits(max_rows=7, checks=True)
    with pytest.raises(ConfigError, match="max_rows is None; allowed: an integer from 1"):
        layers[0].reserve(None)
    with monkeypatch.context() as moved:
        moved.setattr(MoELayer, "device", card)
        assert [layer.limits.max_rows for layer in layers] == [4096, 7]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("max_rows", [1, 2, 3, 7, 64])
def test_pieces_of_any_size_give_the_same_bits(backend, max_rows, rng):
    layer = whole(rng, backend, "a8")
    x, ids, weights = random_call(rng, layer, 7)
    expected = layer(x), layer.experts(x, ids, weights), layer.shared(x)
    pieces = MoELayer(
        layer.config,
        layer.bank,
        layer.router,
        layer.shared,
        limits=Limits(max_rows),
        backend=backend,
    )
    assert_same_bits(pieces(x), expected[0])
    assert_same_bits(pieces.experts(x, ids, weights), expected[1])
    layer.shared.reserve(max_rows)
    assert_same_bits(layer.shared(x), expected[2])
    layer.reserve(max_rows)
    assert layer.limits.max_rows == max_rows
    assert_same_bits(layer(x), expected[0])


@pytest.mark.parametrize("numerics", CLASSES)
def test_y_is_the_only_allocation(numerics, rng):
    layer = whole(rng, "cpu", numerics)
    x, ids, weights = random_call(rng, layer, 64)
    calls = [lambda: layer.experts(x, ids, weights), lambda: layer(x), lambda: layer.shared(x)]
    for call in calls:
        call()
        with torch.profiler.profile(profile_memory=True) as profile:
            y = call()
        events = profile.profiler.kineto_results.events()
        sizes = [e.nbytes() for e in events if e.name() == "[memory]" and e.nbytes() > 0]
        assert y.nbytes in sizes
        sizes.remove(y.nbytes)
        assert max(sizes, default=0) <= 64, sizes  # counters and scalars


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_in_inference_mode_and_under_no_grad(backend, rng):
    layer = whole(rng, backend)
    x = normal(rng, 3, 128)
    expected = layer(x)
    with torch.inference_mode():
        assert_same_bits(layer(x).clone(), expected)
    with torch.no_grad():
        assert_same_bits(layer(x.clone().requires_grad_()), expected)
    assert_same_bits(layer(x), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_subnormals_are_kept_whatever_the_caller_flushes(backend, rng):
    layer = whole(rng, backend)
    x, ids, weights = random_call(rng, layer, 4)
    x, weights = x * 2.0**-60, weights * 2.0**-10
    x[1] *= 2.0**-68
    expected = layer.experts(x, ids, weights), layer.shared(x), layer(x)
    assert bool(((expected[0] != 0) & (expected[0].abs() < 2.0**-126)).any())
    assert torch.set_flush_denormal(True)
    try:
        found = layer.experts(x, ids, weights), layer.shared(x), layer(x)
    finally:
        torch.set_flush_denormal(False)
    for one, other in zip(found, expected, strict=True):
        assert_same_bits(one, other)


def test_route_is_what_the_whole_block_takes(rng):
    layer = whole(rng, "cpu", limits=Limits(max_rows=3))
    layer.shared = None
    x, _, _ = random_call(rng, layer, 8)
    ids, weights = layer.route(x)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    assert_same_bits(layer.experts(x, ids, weights), layer(x))


def test_repr_and_explain_name_what_runs(rng):
    layer = whole(rng, "cpu", "a8")
    text = str(layer.explain(1000))
    assert "cpu" in text and "1000 tokens in 2 pieces" in text and "a8" in text
    assert layer.explain(1000).to_dict()["pieces"] == 2
    assert "mxfp4" in str(layer.shared.explain()) or "bf16" in str(layer.shared.explain())
    assert "num_experts=8" in repr(layer)


def test_explain_is_json_whatever_switches_are_set(rng, monkeypatch):
    """As they are written in the environment: a folder and on or off are no JSON by themselves."""
    layer, given = whole(rng, "cpu"), {}
    for name, text in (
        ("EXACTMOE_CACHE", "/somewhere"),
        ("EXACTMOE_EARLY", "off"),
        ("EXACTMOE_EXPERTS", "two"),
    ):
        monkeypatch.setenv(name, text)
        given[name] = text
    found = json.loads(json.dumps(layer.explain(8).to_dict()))["switches"]
    assert {name: found[name] for name in given} == given


def test_a_class_that_the_sizes_cannot_carry_is_refused(rng):
    bank = random_bank(rng, "nvfp4", 2, 96, 160)
    with pytest.raises(Unsupported, match=r"\(96, 160\).*128"):
        layer_of(bank, 1, numerics="a8")
    config = MoEConfig(hidden_size=96, intermediate_size=160, num_experts=3, top_k=1)
    with pytest.raises(ConfigError, match=r"\(2, 96, 160\).*\(3, 96, 160\)"):
        MoELayer(config, bank)
