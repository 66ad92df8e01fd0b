"""Layer specs, refusals, names and ignore rules of both families."""

from typing import Any

import pytest

from checkpoint_maker import deepseek_config, glm_config
from exactmoe.config import MoEConfig, Numerics, RouterConfig
from exactmoe.errors import CheckpointError, ConfigError, Unsupported
from exactmoe.families import MODEL_TYPES, Family, family_of


def test_glm_layers() -> None:
    family = family_of(glm_config(swiglu_limit=7.5))
    assert (family.model_type, family.num_layers) == ("glm5_next", 2)
    dense, moe = family.layers
    assert (dense.kind, dense.intermediate_size, dense.swiglu_limit) == ("dense", 48, 7.5)
    assert (dense.moe, dense.router, dense.routing, dense.shared_size) == (None, None, None, None)
    assert dense.names.dense("down") == "model.language_model.layers.0.mlp.down_proj"
    assert moe.moe == MoEConfig(64, 32, num_experts=4, top_k=2, swiglu_limit=7.5, numerics="a16")
    assert moe.router == RouterConfig("sigmoid", factor=2.5, normalize=True)
    assert (moe.kind, moe.routing, moe.shared_size) == ("moe", "score", 32)
    names, block = moe.names, "model.language_model.layers.1.mlp"
    assert names.expert(3, "gate") == f"{block}.experts.3.gate_proj"
    assert names.shared("up") == f"{block}.shared_experts.up_proj"
    assert names.router_weight == f"{block}.gate.weight"
    assert names.router_bias == f"{block}.gate.e_score_correction_bias"
    assert names.router_table is None


def test_glm_shared_expert_of_two_is_twice_as_wide() -> None:
    assert family_of(glm_config(n_shared_experts=2)).layer(1).shared_size == 64


def test_glm_flat_and_text_only_configs() -> None:
    text = glm_config()["text_config"]
    layers = family_of(glm_config()).layers
    assert family_of({**text, "model_type": "glm5_next"}).layers == layers
    assert family_of(text).layers == layers


def test_glm_first_k_dense_replace() -> None:
    config = glm_config(first_k_dense_replace=1, num_hidden_layers=3)
    del config["text_config"]["mlp_layer_types"]
    assert [spec.kind for spec in family_of(config).layers] == ["dense", "moe", "moe"]


def test_deepseek_layers() -> None:
    family = family_of(deepseek_config())
    hashed, scored = family.layers
    assert hashed.moe == MoEConfig(128, 128, 4, 2, swiglu_limit=10.0, numerics="a8")
    assert hashed.router == RouterConfig("sqrt_softplus", factor=1.5, normalize=True)
    assert (hashed.routing, scored.routing) == ("hash", "score")
    assert (hashed.shared_size, hashed.vocab_size) == (128, 10)
    assert hashed.names.expert(2, "gate") == "layers.0.ffn.experts.2.w1"
    assert hashed.names.expert(2, "up") == "layers.0.ffn.experts.2.w3"
    assert hashed.names.expert(2, "down") == "layers.0.ffn.experts.2.w2"
    assert hashed.names.router_table == "layers.0.ffn.gate.tid2eid"
    assert hashed.names.router_bias is None
    assert scored.names.router_table is None
    assert scored.names.router_bias == "layers.1.ffn.gate.bias"


def test_deepseek_num_hash_layers() -> None:
    config = deepseek_config(num_hash_layers=3, num_hidden_layers=5)
    del config["mlp_layer_types"]
    routing = [spec.routing for spec in family_of(config).layers]
    assert routing == ["hash", "hash", "hash", "score", "score"]


@pytest.mark.parametrize("make", [glm_config, deepseek_config])
def test_norm_topk_prob_is_honoured(make: Any) -> None:
    router = family_of(make(norm_topk_prob=False)).layer(1).router
    assert router is not None and router.normalize is False


def test_numerics_of_the_caller() -> None:
    numerics = Numerics(slot="f32")
    family = family_of(deepseek_config(), numerics=numerics)
    assert family.numerics == numerics
    assert family.layer(0).moe.numerics == numerics  # type: ignore[union-attr]


def test_bf16_router_only_when_asked_for() -> None:
    config = glm_config(moe_router_dtype="bfloat16")
    with pytest.raises(Unsupported, match="bfloat16.*router='bf16_ladder'"):
        family_of(config)
    assert family_of(config, numerics=Numerics(router="bf16_ladder")).num_layers == 2
    assert family_of(glm_config(moe_router_dtype="float32")).num_layers == 2


@pytest.mark.parametrize("make", [glm_config, deepseek_config])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n_group", 8),
        ("topk_group", 4),
        ("hidden_act", "gelu"),
        ("moe_router_dtype", "float16"),
        ("topk_method", "greedy"),
    ],
)
def test_refused_values_are_named(make: Any, field: str, value: Any) -> None:
    with pytest.raises(Unsupported, match=f"{field} is {value!r}; allowed: "):
        family_of(make(**{field: value}))


def test_refused_values_of_one_family() -> None:
    with pytest.raises(Unsupported, match="scoring_func is 'softmax'"):
        family_of(deepseek_config(scoring_func="softmax"))
    with pytest.raises(Unsupported, match="scoring_func is 'sqrtsoftplus'"):
        family_of(glm_config(scoring_func="sqrtsoftplus"))
    with pytest.raises(Unsupported, match="mlp_bias is True"):
        family_of(deepseek_config(mlp_bias=True))
    with pytest.raises(Unsupported, match="n_shared_experts is 2"):
        family_of(deepseek_config(n_shared_experts=2))
    with pytest.raises(Unsupported, match=r"mlp_layer_types\[1\] is 'sparse'"):
        family_of(deepseek_config(mlp_layer_types=["moe", "sparse"]))


@pytest.mark.parametrize("make", [glm_config, deepseek_config])
@pytest.mark.parametrize(
    "field",
    [
        "swiglu_limit",
        "routed_scaling_factor",
        "norm_topk_prob",
        "n_routed_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "hidden_size",
        "num_hidden_layers",
        "mlp_layer_types",
    ],
)
def test_what_decides_a_result_is_never_defaulted(make: Any, field: str) -> None:
    config = make()
    del config.get("text_config", config)[field]
    with pytest.raises(ConfigError, match=f"config has no {field}"):
        family_of(config)


def test_malformed_values() -> None:
    with pytest.raises(ConfigError, match="hidden_size is '64'"):
        family_of(glm_config(hidden_size="64"))
    with pytest.raises(ConfigError, match="norm_topk_prob is 1"):
        family_of(glm_config(norm_topk_prob=1))
    with pytest.raises(ConfigError, match="mlp_layer_types has 1 entries; num_hidden_layers is 2"):
        family_of(glm_config(mlp_layer_types=["dense"]))


def test_unknown_model_type_lists_the_known() -> None:
    with pytest.raises(Unsupported, match="model_type is 'llama'") as caught:
        family_of({"model_type": "llama"})
    assert all(name in str(caught.value) for name in MODEL_TYPES)


def test_layer_out_of_range() -> None:
    allowed = r"layer is 3; allowed: 0 to 2 \(multi-token prediction from 2\)"
    with pytest.raises(ConfigError, match=allowed):
        family_of(glm_config()).layer(3)
    with pytest.raises(ConfigError, match="layer is 2; allowed: 0 to 1$"):
        family_of(glm_config(num_nextn_predict_layers=0)).layer(2)
    with pytest.raises(ConfigError, match="layer is -1"):
        family_of(glm_config()).layer(-1)


@pytest.mark.parametrize(
    ("config", "prefix", "block"),
    [
        (glm_config(), "model.language_model.", "mlp"),
        (glm_config(), "model.", "mlp"),
        (glm_config(), "", "mlp"),
        (deepseek_config(), "", "ffn"),
        (deepseek_config(), "model.", "ffn"),
    ],
)
def test_prefix_is_taken_from_the_tensor_names(
    config: dict[str, Any], prefix: str, block: str
) -> None:
    names = ["lm_head.weight", "model.visual.norm.weight", f"{prefix}layers.0.norm.weight"]
    family = family_of(config, names)
    assert family.layer(1).names.block == f"{prefix}layers.1.{block}"


def test_no_prefix_and_two_prefixes() -> None:
    with pytest.raises(CheckpointError, match="no tensor of a deepseek_v4 layer"):
        family_of(deepseek_config(), ["embed.weight"])
    with pytest.raises(CheckpointError, match="layers.0.a and model.layers.0.a"):
        family_of(deepseek_config(), ["layers.0.a", "model.layers.0.a"])


def _rule(family: Family, tensor: str) -> str | None:
    rule = family.ignored_by(tensor)
    return None if rule is None else rule.name


GLM_RULES = {
    "model.language_model.layers.2.mlp.experts.0.gate_proj.weight": "mtp",
    "model.language_model.layers.1.mlp.experts.0.gate_proj.input_global_scale": "input_scale",
    "model.language_model.layers.1.mlp.experts.gate_up_proj_input_scale": "input_scale",
    "model.language_model.layers.1.mlp.experts.0.gate_proj.input_scale": "input_scale",
    "model.language_model.layers.1.mlp.shared_experts.up_proj.input_scale": "input_scale",
    "model.language_model.layers.0.self_attn.k_proj.k_scale": "kv_scale",
    "model.language_model.layers.0.self_attn.v_scale": "kv_scale",
    "model.language_model.layers.0.self_attn.q_proj.weight_scale": "attention",
    "model.visual.blocks.0.mlp.gate_proj.weight": "vision_tower",
    "model.language_model.layers.0.hc_ffn_scale": "hyper_connection",
    "model.language_model.layers.0.post_attention_layernorm.weight": "norm",
    "model.language_model.norm.weight": "norm",
    "model.language_model.embed_tokens.weight": "embedding",
    "lm_head.weight": "embedding",
    # nobody's: these must be consumed, or they are errors
    "model.language_model.layers.1.mlp.experts.0.gate_proj.weight": None,
    "model.language_model.layers.1.mlp.experts.0.gate_proj.weight_scale": None,
    "model.language_model.layers.3.mlp.gate.weight": None,
    "model.language_model.layers.1.mlp.gate_proj.bias": None,
    "something.else": None,
}

DEEPSEEK_RULES = {
    "mtp.0.ffn.experts.0.w1.weight": "mtp",
    "layers.1.ffn.experts.0.w1.input_scale": "input_scale",
    "layers.1.attn.kv_scale": "kv_scale",
    "layers.1.attn.wo_a.scale": "attention",
    "layers.1.attn.indexer.wq_b.weight": "attention",
    "model.layers.1.hc_attn_base": "hyper_connection",
    "hc_head_fn": "hyper_connection",
    "model.hc_head.hc_scale": "hyper_connection",
    "layers.1.ffn_norm.weight": "norm",
    "model.norm.weight": "norm",
    "embed.weight": "embedding",
    "head.weight": "embedding",
    "model.embed_tokens.weight": "embedding",
    "lm_head.weight": "embedding",
    "layers.1.ffn.experts.0.w1.scale": None,
    "layers.1.ffn.gate.bias": None,
    "layers.1.ffn.shared_experts.w1.weight": None,
}


@pytest.mark.parametrize(
    ("config", "expected"), [(glm_config(), GLM_RULES), (deepseek_config(), DEEPSEEK_RULES)]
)
def test_ignore_rules(config: dict[str, Any], expected: dict[str, str | None]) -> None:
    family = family_of(config)
    assert {tensor: _rule(family, tensor) for tensor in expected} == expected
    assert all(rule.reason for rule in family.ignore)


def test_mtp_rule_follows_the_config() -> None:
    tensor = "model.language_model.layers.{}.mlp.gate.weight"
    two = family_of(glm_config(num_nextn_predict_layers=2))
    assert [_rule(two, tensor.format(i)) for i in (2, 3, 4)] == ["mtp", "mtp", None]
    none = family_of(glm_config(num_nextn_predict_layers=0))
    assert _rule(none, tensor.format(2)) is None


def test_glm_mtp_layers() -> None:
    family = family_of(glm_config(num_nextn_predict_layers=2))
    assert family.num_layers == 2
    names = [spec.names.block for spec in family.mtp_layers]
    assert names == [f"model.language_model.layers.{i}.mlp" for i in (2, 3)]
    spec = family.layer(3)
    assert (spec.layer, spec.kind, spec.is_mtp, spec.routing) == (3, "moe", True, "score")
    assert spec.moe == family.layer(1).moe and not family.layer(1).is_mtp


def test_deepseek_mtp_layers() -> None:
    names = ["layers.0.attn.wo_a.weight", "mtp.0.ffn.gate.weight", "mtp.1.ffn.gate.weight"]
    family = family_of(deepseek_config(), names)
    assert [spec.names.block for spec in family.mtp_layers] == ["mtp.0.ffn", "mtp.1.ffn"]
    spec = family.layer(3)
    assert (spec.layer, spec.is_mtp, spec.routing) == (3, True, "score")
    assert (spec.names.router_bias, spec.names.router_table) == ("mtp.1.ffn.gate.bias", None)
    assert len(family_of(deepseek_config()).mtp_layers) == 1
    assert family_of(deepseek_config(), names[:1]).mtp_layers == ()


def test_a_load_of_an_mtp_layer_is_not_ignored() -> None:
    for config, tensor in (
        (glm_config(), "model.language_model.layers.2.mlp.experts.0.up_proj.weight"),
        (deepseek_config(), "mtp.0.ffn.experts.0.w1.weight"),
    ):
        family = family_of(config)
        mtp = family.layer(2)
        assert _rule(family, tensor) == "mtp"
        assert family.ignored_by(tensor, family.layer(1)) is not None
        assert family.ignored_by(tensor, mtp) is None
        scale = tensor.replace(".weight", ".input_scale")
        rule = family.ignored_by(scale, mtp)
        assert rule is not None and rule.name == "input_scale"
