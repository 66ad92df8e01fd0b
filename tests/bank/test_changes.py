"""Weights changed in place, exchanged, or written behind torch's back."""

import copy

import pytest
import torch

from exactmoe import DenseMLP, MoELayer, PackedWeight, Router, RouterConfig
from exactmoe.errors import ConfigError
from layers import assert_same_bits, layer_of, normal, random_bank

SIGMOID = RouterConfig(score="sigmoid")


def make(rng, format: str = "mxfp4", backend: str = "cpu") -> MoELayer:
    """4 experts, top 2, H = 64, I = 32, a bf16 router and a shared expert."""
    router = Router(normal(rng, 4, 64), torch.randn(4, generator=rng), config=SIGMOID)
    shared = DenseMLP(normal(rng, 32, 64), normal(rng, 32, 64), normal(rng, 64, 32))
    bank = random_bank(rng, format, 4, 64, 32)
    return layer_of(bank, 2, backend, router=router, shared=shared)


def add_to_block_scales(layer: MoELayer) -> None:
    layer.bank.gate_scales.add_(3)


def negate_router(layer: MoELayer) -> None:
    layer.router.weight.mul_(-1)


def exchange_codes(layer: MoELayer) -> None:
    layer.bank.gate_codes = layer.bank.gate_codes.flip(0).contiguous()


def exchange_router(layer: MoELayer) -> None:
    layer.router.weight = layer.router.weight.flip(0)


def set_other_memory(layer: MoELayer) -> None:
    layer.bank.down_codes.data = layer.bank.down_codes.flip(1).contiguous()


def scale_shared(layer: MoELayer) -> None:
    layer.shared.bank.gate_codes.mul_(2.0**-100)  # beyond what kernels/cpu/exact.py covers


CHANGES = [
    add_to_block_scales,
    negate_router,
    exchange_codes,
    exchange_router,
    set_other_memory,
    scale_shared,
]


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen_by_the_next_call(change, backend, inference, rng):
    layer, x = make(rng, backend=backend), normal(rng, 5, 64)
    before = layer(x)
    with torch.inference_mode(inference):  # the weights are ordinary tensors: they have a version
        change(layer)
    found = layer(x)
    assert_same_bits(found, copy.deepcopy(layer)(x))
    assert not torch.equal(found, before)


def test_global_scales_are_read_as_they_are(rng):
    layer, x = make(rng, "nvfp4"), normal(rng, 5, 64)
    layer(x)
    layer.bank.up_global_scale.mul_(3)
    assert_same_bits(layer(x), copy.deepcopy(layer)(x))


def test_a_change_to_bytes_that_are_refused_never_computes(rng):
    layer, x = make(rng), normal(rng, 5, 64)
    layer(x)
    layer.bank.up_scales[1, 2, 0] = 0xFF
    for _ in range(2):
        with pytest.raises(ConfigError, match="0xFF .*expert 1, row 2, block 0"):
            layer(x)


def test_weights_made_in_inference_mode_run_and_are_exchanged(rng):
    with torch.inference_mode():
        layer = make(rng)
    x = normal(rng, 5, 64)
    layer(x)
    exchange_codes(layer)
    assert_same_bits(layer(x).clone(), copy.deepcopy(layer)(x).clone())


def test_nothing_is_prepared_twice_without_a_change(rng):
    bank, made = random_bank(rng, "nvfp4", 2, 64, 32), []

    def prepare(weight: PackedWeight) -> int:
        made.append(weight)
        return len(made)

    assert [bank.prepared("gate", "a test", prepare) for _ in range(3)] == [1, 1, 1]
    bank.gate_codes.bitwise_not_()
    assert [bank.prepared("gate", "a test", prepare) for _ in range(3)] == [2, 2, 2]
    assert bank.gate is bank.gate is made[1]
    router = Router(normal(rng, 4, 64), config=SIGMOID)
    assert router.weight_f32 is router.weight_f32


def test_refresh_after_a_write_that_torch_does_not_count(rng):
    layer, x = make(rng), normal(rng, 5, 64)
    layer(x)
    layer.bank.gate_scales.data.add_(3)
    layer.router.weight.data.mul_(-1)
    layer.shared.bank.gate_codes.data.mul_(2.0**-100)
    fresh = copy.deepcopy(layer)(x)
    layer.refresh()
    assert_same_bits(layer(x), fresh)


def test_refresh_checks_the_values(rng):
    layer, x = make(rng), normal(rng, 5, 64)
    layer.bank.up_scales.data[1, 2, 0] = 0xFF
    with pytest.raises(ConfigError, match="0xFF .*expert 1, row 2, block 0"):
        layer.refresh()
    with pytest.raises(ConfigError, match="0xFF .*expert 1, row 2, block 0"):
        layer(x)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_table_changed_to_ids_that_no_expert_has_is_refused(backend, rng):
    table = torch.randint(4, (9, 2), generator=rng)
    router = Router(normal(rng, 4, 64), table=table, config=SIGMOID)
    layer = layer_of(random_bank(rng, "mxfp4", 4, 64, 32), 2, backend, router=router)
    x, tokens = normal(rng, 3, 64), torch.tensor([0, 4, 8])
    layer(x, tokens)
    layer.router.table[4, 1] = 1 << 40
    for call in (layer, layer.route):
        with pytest.raises(ConfigError, match="row 4, column 1 is 1099511627776; allowed: 0 to 3"):
            call(x, tokens)


@pytest.mark.parametrize("part", ["bank.gate_codes", "router.weight"])
def test_a_buffer_whose_memory_was_given_back_is_refused(part, rng):
    layer, x = make(rng), normal(rng, 5, 64)
    layer(x)
    layer.get_buffer(part).untyped_storage().resize_(0)
    with pytest.raises(ConfigError, match=f"{part.split('.')[1]} has no memory"):
        layer(x)


def test_a_router_on_meta_is_filled_later(rng):
    router = Router(normal(rng, 4, 64), table=torch.randint(4, (9, 2)), config=SIGMOID)
    empty = copy.deepcopy(router).to("meta")
    empty.refresh()
    empty.load_state_dict(router.state_dict(), assign=True)
    assert_same_bits(empty.weight_f32, router.weight.float())
    assert_same_bits(empty.checked_table, router.table)
