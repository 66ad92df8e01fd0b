"""MoELayer over FP8 experts (class a16): reference bytes, the proof, copies, explain."""

import copy
import pickle

import pytest
import torch

from exactmoe import DenseMLP, ExpertBank, MoEConfig, MoELayer, Router, RouterConfig
from exactmoe.proof.verify import verify
from exactmoe.reference import combine, expert_slots, finish
from layers import (
    BACKENDS,
    assert_same_bits,
    fp8_blocks,
    layer_of,
    normal,
    random_call,
    relative_l2,
    true_experts,
)

EXPERTS, HIDDEN, INNER = 5, 144, 272  # neither is a multiple of 128


@pytest.fixture
def bank(rng) -> ExpertBank:
    sizes = ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
    values = [torch.randn(EXPERTS, n, k, generator=rng) / k**0.5 for n, k in sizes]
    return ExpertBank(*(fp8_blocks(value) for value in values))


@pytest.fixture
def layer(bank, rng) -> MoELayer:
    """With a router and an FP8 shared expert."""
    router = Router(normal(rng, EXPERTS, HIDDEN), config=RouterConfig("sigmoid", factor=2.5))
    sizes = ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
    shared = (fp8_blocks(torch.randn(1, n, k, generator=rng) / k**0.5) for n, k in sizes)
    config = MoEConfig(HIDDEN, INNER, EXPERTS, 2, swiglu_limit=3.0)
    return MoELayer(config, bank, router=router, shared=DenseMLP(*shared, swiglu_limit=3.0))


@pytest.mark.parametrize("backend", BACKENDS)
def test_experts_are_the_reference(backend, bank, rng):
    layer = layer_of(bank, 2, backend)
    x, ids, weights = random_call(rng, layer, 7)
    parts = (bank.gate, bank.up, bank.down)
    slots = expert_slots(x, ids, weights, parts, None, layer.numerics)
    right = finish(combine(slots, ids, weights, EXPERTS, "a16"), None, "bf16")
    assert_same_bits(layer.experts(x, ids, weights), right)
    truth = true_experts(bank, x, ids, weights)
    assert relative_l2(layer.experts(x, ids, weights), truth) < 2.0**-8


def test_whole_block_has_the_bytes_of_the_reference_backend(layer, rng):
    x = normal(rng, 9, HIDDEN)
    found = layer(x)
    layer.backend = layer.shared.backend = "reference"
    assert_same_bits(found, layer(x))


def test_the_proof_holds(layer):
    """Both entries of the layer, and the shared expert alone."""
    for block in (layer, layer.shared):
        verify(block, widths=(1, 3, 8), repeats=3).raise_on_mismatch()


@pytest.mark.parametrize(
    "change", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), lambda m: m.bfloat16()]
)
def test_copies_and_casts_change_no_byte(change, layer, rng):
    x = normal(rng, 3, HIDDEN)
    y = layer(x)
    assert_same_bits(change(layer)(x), y)


def test_explain_names_the_format(layer):
    explanation = layer.explain()
    assert explanation.formats == ("fp8",) * 3
    assert explanation.fp8_experts == (EXPERTS,) * 3
    assert layer.bank.nbytes == 3 * EXPERTS * (HIDDEN * INNER + 2 * 3 * 4)
