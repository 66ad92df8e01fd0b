"""`experts_implementation="exactmoe"`: the experts-only contract, models loaded by transformers."""

import copy
import gc

import pytest
import torch
from torch import nn
from transformers import Qwen3MoeConfig
from transformers.integrations.finegrained_fp8 import FP8Experts, FP8ExpertsInterface
from transformers.integrations.moe import ExpertsInterface, use_experts_implementation
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from exactmoe import ExpertBank, MoEConfig, MoELayer, PackedWeight
from exactmoe.errors import ConfigError, Unsupported
from exactmoe.formats import quantize
from exactmoe.hf import adapter, experts, explain
from exactmoe.hf.experts import experts_forward

LIMITS = {"glm5_next": "swiglu_limit", "deepseek_v4": "limit"}


@pytest.fixture(scope="module")
def bf16_model(family, sources):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(sources[family])
    loaded = adapter.auto_class(config).from_pretrained(
        sources[family], dtype=torch.bfloat16, experts_implementation="exactmoe"
    )
    # Without it transformers 5.17 runs no bf16 DeepSeek-V4, whoever computes its experts.
    adapter.keep_rows_bf16(loaded)
    return loaded


@pytest.fixture
def module(bf16_model):
    """A copy of one experts module."""
    return copy.deepcopy(experts.modules(bf16_model)[-1][1])


def routes(rng, num_tokens, num_experts=8, top_k=2):
    ids = torch.rand(num_tokens, num_experts, generator=rng).argsort(1)[:, :top_k]
    return ids, torch.rand(num_tokens, top_k, generator=rng)


def rows(rng, num_tokens, module):
    return torch.randn(num_tokens, module.gate_up_proj.shape[2], generator=rng).bfloat16()


def expected(module, limit, x, ids, weights, numerics="a16"):
    """The same bf16 weights, copied, in a layer of ours."""
    gate, up = module.gate_up_proj.detach().clone().chunk(2, 1)
    down = module.down_proj.detach().clone()
    parts = [PackedWeight("bf16", w.contiguous()) for w in (gate, up, down)]
    sizes = (down.shape[1], down.shape[2], down.shape[0])
    config = MoEConfig(*sizes, ids.shape[1], swiglu_limit=limit, numerics=numerics)
    return MoELayer(config, ExpertBank(*parts)).experts(x, ids, weights)


@torch.no_grad()
def test_generates_through_our_function(bf16_model, token_ids):
    names = [name for name, _ in experts.modules(bf16_model)]
    assert len(names) == (3 if "Glm" in type(bf16_model).__name__ else 4)
    tokens = bf16_model.generate(token_ids, max_new_tokens=6, do_sample=False)
    assert tokens.shape == (1, token_ids.shape[1] + 6)
    assert all(module in experts._layers for _, module in experts.modules(bf16_model))


@torch.no_grad()
def test_equals_our_layer(module, family, rng):
    x, (ids, weights) = rows(rng, 33, module), routes(rng, 33)
    limit = getattr(module, LIMITS[family])
    found = module(x, ids, weights)
    assert found.dtype == torch.bfloat16
    assert found.equal(expected(module, limit, x, ids, weights))
    # The clamp is a part of it: values reach it.
    setattr(module, LIMITS[family], 0.5)
    experts._layers.pop(module)
    clamped = module(x, ids, weights)
    assert clamped.equal(expected(module, 0.5, x, ids, weights))
    assert not clamped.equal(found)


@torch.no_grad()
def test_near_the_eager_forward(module, rng):
    """bf16 eager rounds gate, up, their product and every expert's sum; measured 0.005."""
    x, (ids, weights) = rows(rng, 33, module), routes(rng, 33)
    found = module(x, ids, weights).float()
    module.config = copy.deepcopy(module.config)
    module.config._experts_implementation = "eager"
    eager = module(x, ids, weights).float()
    assert (found - eager).norm() / eager.norm() < 0.01


@torch.no_grad()
def test_no_second_copy_of_the_weights(module, rng):
    module(rows(rng, 1, module), *routes(rng, 1))
    bank = experts.layer_of(module, 2).bank
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    assert {b.untyped_storage().data_ptr() for b in bank.buffers()} == own
    assert bank.gate.codes.data_ptr() == module.gate_up_proj.data_ptr()
    assert bank.up.codes.data_ptr() == module.gate_up_proj[:, bank.gate.rows].data_ptr()


@torch.no_grad()
def test_one_row_alone_has_the_same_bits(module, rng):
    x, (ids, weights) = rows(rng, 40, module), routes(rng, 40)
    whole = module(x, ids, weights)
    for t in (0, 1, 17, 39):
        part = slice(t, t + 1)
        assert module(x[part], ids[part], weights[part])[0].equal(whole[t])


@torch.no_grad()
def test_absent_ids_contribute_nothing(module, rng):
    x, (ids, weights) = rows(rng, 6, module), routes(rng, 6)
    # What other ranks' experts look like (id num_experts, weight 0), and padding (-1).
    absent = torch.tensor([8, 9, -1, 8, 1000, -5])
    weights[:, 1] = torch.tensor([0.0, 1.0, 2.0, float("nan"), 1.0, 1.0])
    ids[:, 1] = absent
    found = module(x, ids, weights)
    assert found.equal(module(x, ids[:, :1], weights[:, :1]))
    assert ids[:, 1].equal(absent)
    only_absent = torch.full((6, 2), 8)
    assert not module(x, only_absent, torch.zeros(6, 2)).any()
    # Such ids are expected here, so they are no fault.
    experts.layer_of(module, 2).check()


@torch.no_grad()
def test_int32_ids_bf16_weights_and_keywords(module, rng):
    x, (ids, weights) = rows(rng, 5, module), routes(rng, 5)
    narrow = weights.bfloat16()
    found = experts_forward(module, x, ids.int(), narrow, process_group=None)
    assert found.equal(module(x, ids, narrow.float()))
    with pytest.raises(Unsupported, match=r"top_k_weights are torch.float64; allowed: float32"):
        module(x, ids, weights.double())


@torch.no_grad()
def test_a_replaced_parameter_is_seen(module, rng):
    x, (ids, weights) = rows(rng, 5, module), routes(rng, 5)
    before = module(x, ids, weights)
    first = experts.layer_of(module, 2)
    assert experts.layer_of(module, 2) is first
    module.down_proj = nn.Parameter(-module.down_proj.detach())
    assert experts.layer_of(module, 2) is not first
    assert module(x, ids, weights).equal(-before)
    module.down_proj.data.neg_()
    assert module(x, ids, weights).equal(before)


def test_layers_go_with_their_modules(module, rng):
    with torch.no_grad():
        module(rows(rng, 1, module), *routes(rng, 1))
    gc.collect()  # modules of other tests
    before = len(experts._layers)
    copied = copy.deepcopy(module)
    experts.layer_of(copied, 2)
    assert len(experts._layers) == before + 1
    del copied
    gc.collect()
    assert len(experts._layers) == before


def test_gradients_are_refused(module, rng):
    x, (ids, weights) = rows(rng, 5, module), routes(rng, 5)
    with pytest.raises(Unsupported, match="needs gradients; .* torch.no_grad"):
        module(x.requires_grad_(), ids, weights)
    with pytest.raises(Unsupported, match="needs gradients"):
        module(x.detach(), ids, weights.requires_grad_())
    with torch.no_grad():
        module(x, ids, weights)


def test_unknown_gates_are_refused(module, rng):
    class Other(type(module)):
        def _apply_gate(self, gate_up):
            return super()._apply_gate(gate_up)

    x, (ids, weights) = rows(rng, 2, module), routes(rng, 2)
    other = copy.deepcopy(module)
    other.__class__ = Other
    with (
        torch.no_grad(),
        pytest.raises(Unsupported, match=r"gate by .*Other\._apply_gate; known here"),
    ):
        other(x, ids, weights)
    module._apply_gate = lambda gate_up: gate_up
    with torch.no_grad(), pytest.raises(Unsupported, match=r"gate by .*<lambda>; known here"):
        module(x, ids, weights)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("is_transposed", True),
        ("has_bias", True),
        ("has_gate", False),
        ("is_concatenated", False),
        ("has_post_expert_norm", True),
    ],
)
def test_other_layouts_are_refused(module, rng, flag, value):
    setattr(module, flag, value)
    with (
        torch.no_grad(),
        pytest.raises(Unsupported, match=f"has {flag} = {value}; allowed: {not value}"),
    ):
        module(rows(rng, 2, module), *routes(rng, 2))


def test_float32_models_are_refused(module, rng):
    x, (ids, weights) = rows(rng, 2, module), routes(rng, 2)
    with (
        torch.no_grad(),
        pytest.raises(ConfigError, match=r"codes is torch.float32 .*; allowed: a torch.bfloat16"),
    ):
        module.float()(x.float(), ids, weights)


def qwen_experts(rng, hidden_act="silu"):
    config = Qwen3MoeConfig(
        hidden_size=64,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        hidden_act=hidden_act,
    )
    config._experts_implementation = "exactmoe"
    module = Qwen3MoeExperts(config)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=rng).mul(0.1).bfloat16()
    return module


@torch.no_grad()
def test_the_default_gate(rng):
    """Any model with transformers' default gate: SiLU, no clamp."""
    module = qwen_experts(rng)
    x, (ids, weights) = rows(rng, 9, module) * 40, routes(rng, 9)
    found = module(x, ids, weights)
    assert found.equal(expected(module, None, x, ids, weights))
    assert not found.equal(expected(module, 10.0, x, ids, weights))


@torch.no_grad()
def test_another_activation_is_refused(rng):
    module = qwen_experts(rng, "gelu")
    with pytest.raises(Unsupported, match=r"has activation GELU.*; allowed: SiLU"):
        module(rows(rng, 2, module), *routes(rng, 2))


def fp4_experts(rng, **fields):
    """transformers' own FP8Experts as it holds native DeepSeek-V4 experts: int8 and E8M0."""
    from transformers import DeepseekV4Config

    config = DeepseekV4Config(hidden_size=128, moe_intermediate_size=128, n_routed_experts=8)
    config._experts_implementation = "exactmoe"
    decorated = use_experts_implementation(
        experts_class=type("FP8Experts", (FP8Experts,), {}),
        experts_interface=FP8ExpertsInterface(),
    )
    config.expert_dtype = "fp4"
    module = nn.Module.__new__(decorated)
    nn.Module.__init__(module)
    module.config, module.num_experts, module.limit = config, 8, 10.0
    module.has_gate, module.has_bias, module.is_transposed = True, False, False
    module.act_fn = nn.SiLU()
    for name, value in fields.items():
        setattr(module, name, value)
    banks = {}
    for name, shape in (("gate_up_proj", (8, 256, 128)), ("down_proj", (8, 128, 128))):
        weight = quantize(torch.randn(shape, generator=rng), "mxfp4")
        banks[name] = weight
        codes, scales = weight.codes.view(torch.int8), weight.scales.view(torch.float8_e8m0fnu)
        setattr(module, name, nn.Parameter(codes, requires_grad=False))
        setattr(module, name + "_scale_inv", nn.Parameter(scales, requires_grad=False))
    return module, banks


@torch.no_grad()
def test_fp4_weights_of_the_stock_quantizer(rng):
    """FP8ExpertsInterface: MXFP4 as it is, class a8, as the model was published."""
    module, packed = fp4_experts(rng)
    x, (ids, weights) = torch.randn(9, 128, generator=rng).bfloat16(), routes(rng, 9)
    gate_up = packed["gate_up_proj"]
    gate, up = (
        PackedWeight("mxfp4", gate_up.codes[:, part], gate_up.scales[:, part])
        for part in (slice(0, 128), slice(128, 256))
    )
    config = MoEConfig(128, 128, 8, 2, swiglu_limit=10.0, numerics="a8")
    layer = MoELayer(config, ExpertBank(gate, up, packed["down_proj"]))
    assert module(x, ids, weights).equal(layer.experts(x, ids, weights))


@torch.no_grad()
@pytest.mark.parametrize("field", ["swiglu_alpha", "gate_softcap"])
def test_other_gates_of_the_stock_quantizer_are_refused(rng, field):
    module, _ = fp4_experts(rng, **{field: 1.7})
    x, (ids, weights) = torch.zeros(2, 128).bfloat16(), routes(rng, 2)
    with pytest.raises(Unsupported, match=rf"{field} is 1.7; allowed: None"):
        module(x, ids, weights)


@torch.no_grad()
def test_fp8_weights_of_the_stock_quantizer_are_refused(rng):
    module, _ = fp4_experts(rng)
    scales = torch.ones(8, 2, 1)
    module.gate_up_proj_scale_inv = nn.Parameter(scales, requires_grad=False)
    x, (ids, weights) = torch.zeros(2, 128).bfloat16(), routes(rng, 2)
    with pytest.raises(Unsupported, match=r"gate_up_proj_scale_inv is torch.float32; allowed"):
        module(x, ids, weights)


def test_registered_in_both_interfaces():
    assert ExpertsInterface()["exactmoe"] is experts_forward
    assert FP8ExpertsInterface()["exactmoe"] is experts_forward


def test_explain_names_the_other_contract(bf16_model):
    text = explain(bf16_model)
    assert text.count("routed experts only (experts_implementation='exactmoe')") == len(
        experts.modules(bf16_model)
    )
    assert "whole block" not in text
