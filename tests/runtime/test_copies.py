"""Whole layers through pickle, deepcopy, .to() and state dicts: the same bits afterwards."""

import copy
import io
import pickle

import pytest
import torch

from exactmoe import DenseMLP, Limits, MoELayer, Router, RouterConfig
from exactmoe.errors import ConfigError
from layers import BACKENDS, CLASSES, assert_same_bits, layer_of, normal, random_bank, random_call


def make(rng, numerics: str = "a16", backend: str = "cpu", **settings) -> MoELayer:
    """6 experts, top 2, biased router, shared expert."""
    bias = torch.randn(6, generator=rng) / 8 + 7
    router = Router(normal(rng, 6, 128), bias, config=RouterConfig(score="sigmoid", factor=2.5))
    sizes = ((64, 128), (64, 128), (128, 64))
    shared = DenseMLP(*(normal(rng, *size, scale=0.1) for size in sizes), 7.0, backend=backend)
    bank = random_bank(rng, "nvfp4", 6, 128, 128)
    settings = {"swiglu_limit": 10.0, "router": router, "shared": shared, **settings}
    return layer_of(bank, 2, backend, numerics=numerics, **settings)


def through_a_file(layer: MoELayer) -> MoELayer:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


CHANGES = [
    lambda layer: copy.deepcopy(layer),
    lambda layer: pickle.loads(pickle.dumps(layer)),
    lambda layer: copy.deepcopy(pickle.loads(pickle.dumps(copy.deepcopy(layer)))),
    through_a_file,
    lambda layer: layer.to(torch.bfloat16),
    lambda layer: layer.half().float(),
    lambda layer: torch.nn.Sequential(layer).to("cpu", torch.bfloat16)[0],
    lambda layer: layer.eval().requires_grad_(False).train(),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("numerics", CLASSES)
@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_gives_the_same_bits_afterwards(change, numerics, backend, rng):
    layer = make(rng, numerics, backend, limits=Limits(max_rows=4, checks=True))
    x, ids, weights = random_call(rng, layer, 5)
    expected = layer(x), layer.experts(x, ids, weights), layer.shared(x)
    moved = change(layer)
    assert_same_bits(moved(x), expected[0])
    assert_same_bits(moved.experts(x, ids, weights), expected[1])
    assert_same_bits(moved.shared(x), expected[2])
    assert (moved.limits, moved.config, moved.backend) == (layer.limits, layer.config, backend)


def test_a_copy_shares_nothing_with_its_origin(rng):
    layer = make(rng)
    x, ids, weights = random_call(rng, layer, 3)
    expected = layer(x)
    other = copy.deepcopy(layer)
    for tensor in layer.state_dict().values():
        tensor.zero_()
    assert_same_bits(other(x), expected)
    ids[0, 0] = 6
    other.experts(x, ids, weights)
    layer.check()
    with pytest.raises(ConfigError):
        other.check()


def test_a_state_dict_makes_another_layer_the_same(rng):
    layer, other = make(rng), make(rng)
    x = normal(rng, 5, 128)
    expected = layer(x)
    before = other(x)
    assert bool((before != expected).any())
    other.load_state_dict(layer.state_dict())
    assert_same_bits(other(x), expected)
    assert "fault" not in layer.state_dict()
    missing = layer.state_dict()
    del missing["bank.up_global_scale"]
    with pytest.raises(RuntimeError, match=r"bank\.up_global_scale"):
        other.load_state_dict(missing)


def test_a_refused_state_dict_never_computes(rng):
    layer = make(rng)
    state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    state["bank.down_scales"][0, 0, 0] = 0x7F
    with pytest.raises(ConfigError, match="0x7F at expert 0, row 0, block 0"):
        layer.load_state_dict(state)
    with pytest.raises(ConfigError, match="0x7F at expert 0, row 0, block 0"):
        layer(normal(rng, 2, 128))


def test_a_dense_mlp_through_copies_and_a_state_dict(rng):
    dense = make(rng).shared
    x = normal(rng, 3, 128)
    expected = dense(x)
    for moved in (copy.deepcopy(dense), pickle.loads(pickle.dumps(dense)), dense.to(torch.float32)):
        assert_same_bits(moved(x), expected)
        assert moved.swiglu_limit == 7.0
    other = make(rng).shared
    other.load_state_dict(dense.state_dict())
    assert_same_bits(other(x), expected)
