"""Traces of layers: the routes that ran, no change of bits, nothing when off, and the file."""

import numpy as np
import pytest
import torch

from exactmoe import Limits
from exactmoe.errors import CheckpointError, ConfigError
from exactmoe.report.route_trace import RouteTrace, tracing
from layers import assert_same_bits, layer_of, random_bank, random_call
from small_layers import VOCABULARY, small_layer


def inputs(layer, rng, tokens):
    x = torch.randn((tokens, layer.config.hidden_size), generator=rng).bfloat16()
    return x, torch.randint(VOCABULARY, (tokens,), generator=rng)


@pytest.mark.parametrize("kind", ["score", "hash"])
def test_what_is_recorded_is_what_the_router_chose(rng, kind):
    layer = small_layer(rng, kind)
    x, token_ids = inputs(layer, rng, 7)
    given = {"token_ids": token_ids} if kind == "hash" else {}
    expected, y = layer.route(x, **given)[0], layer(x, **given)
    with tracing({4: layer}) as read:
        assert_same_bits(layer(x, **given), y)
        layer(x[:2], **{name: value[:2] for name, value in given.items()})
        routes = read().layers[4]
    assert routes.expert_ids.tolist() == [*expected.tolist(), *expected[:2].tolist()]
    assert routes.steps.tolist() == [0] * 7 + [1] * 2
    assert routes.tokens.tolist() == [*range(7), 0, 1]
    assert (routes.num_experts, routes.top_k, routes.is_hashed) == (8, 2, kind == "hash")


def test_given_routes_and_pieces(rng):
    bank = random_bank(rng, "nvfp4", 4, 64, 64)
    layer = layer_of(bank, 2, "cpu", limits=Limits(max_rows=3))
    x, expert_ids, weights = random_call(rng, layer, 8)
    with tracing({0: layer}) as read:
        layer.experts(x, expert_ids, weights)
    routes = read().layers[0]
    assert routes.expert_ids.tolist() == expert_ids.tolist()
    assert routes.steps.tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    assert routes.tokens.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]


def test_off_records_nothing_and_holds_nothing(rng):
    layer = small_layer(rng)
    x, _ = inputs(layer, rng, 3)
    assert layer.route_ring is None
    with tracing({0: layer}) as read:
        assert layer.route_ring is not None
    layer(x)
    assert layer.route_ring is None
    assert len(read().layers[0].steps) == 0
    with pytest.raises(RuntimeError, match="planted"), tracing({0: layer}):
        raise RuntimeError("planted")
    assert layer.route_ring is None


def test_a_layer_is_traced_once_at_a_time(rng):
    layer = small_layer(rng)
    with (
        tracing({2: layer}),
        pytest.raises(ConfigError, match=r"layers \[2\] are traced already"),
        tracing({2: layer}),
    ):
        raise AssertionError("not reached")
    with pytest.raises(ConfigError, match="no layer to trace"), tracing({}):
        raise AssertionError("not reached")


def test_the_file_gives_back_the_trace(rng, tmp_path):
    layers = {3: small_layer(rng), 5: small_layer(rng, "hash")}
    with tracing(layers, capacity=4) as read:
        for layer in layers.values():
            x, token_ids = inputs(layer, rng, 6)
            layer(x, token_ids=token_ids if layer is layers[5] else None)
    trace, path = read(), tmp_path / "routes.npz"
    trace.save(path)
    loaded = RouteTrace.load(path)
    assert list(loaded.layers) == [3, 5]
    for index, routes in trace.layers.items():
        found = loaded.layers[index]
        for part in ("steps", "tokens", "expert_ids"):
            assert np.array_equal(getattr(found, part), getattr(routes, part))
        facts = ("num_experts", "is_hashed", "lost")
        assert [getattr(found, f) for f in facts] == [getattr(routes, f) for f in facts]
    assert (loaded.layers[5].is_hashed, loaded.layers[5].lost) == (True, 2)


def test_files_that_are_no_trace(tmp_path):
    path = tmp_path / "routes.npz"
    with pytest.raises(CheckpointError, match="is no trace of routes"):
        RouteTrace.load(path)
    path.write_bytes(b"not a zip")
    with pytest.raises(CheckpointError, match="is no trace of routes"):
        RouteTrace.load(path)
    np.savez(path, format=np.array([2]))
    with pytest.raises(CheckpointError, match=r"format is \[2\]; allowed: \[1\]"):
        RouteTrace.load(path)
    arrays = {"format": np.array([1]), "layers": np.array([0]), "facts": np.array([[4, 0, 0]])}
    steps = {"layer_0_steps": np.zeros(3), "layer_0_tokens": np.zeros(3)}
    np.savez(path, **arrays, **steps, layer_0_expert_ids=np.zeros((2, 2), np.int32))
    with pytest.raises(CheckpointError, match="arrays of layer 0 differ in length"):
        RouteTrace.load(path)
