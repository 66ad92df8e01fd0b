"""GLM-5-Next (GLM-5.3-Flash): dense layers, then MoE layers with a sigmoid router and class `a16`.

Geometry: transformers, models/glm5_next/configuration_glm5_next.py. Tensor names: the published
checkpoints, which are also what save_pretrained writes. The MTP block is one more MoE layer after
the last one, and transformers never builds it (`_keys_to_ignore_on_load_unexpected`).
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from exactmoe.config import MoEConfig, Numerics, RouterConfig
from exactmoe.families.fields import Fields
from exactmoe.families.spec import MTP_RULE, Family, IgnoreRule, LayerSpec, TensorNames

# The text model alone has its own type, and the flat config of text-only checkpoints the first.
MODEL_TYPES = ("glm5_next", "glm5_next_text")
# Before "layers.": the whole model, the text model with a head, the text model alone.
PREFIXES = ("model.language_model.", "model.", "")
NUMERICS = "a16"

_PROJECTIONS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_KINDS = ("dense", "sparse")


def family(
    config: Mapping[str, Any],
    prefix: str,
    numerics: Numerics,
    tensor_names: Collection[str] | None = None,
) -> Family:
    """The family of a config dict (with or without a nested text_config)."""
    text = config.get("text_config") or config
    fields = Fields(text, config["model_type"])
    num_layers = fields.integer("num_hidden_layers")
    _refuse(fields, numerics)
    kinds = _layer_kinds(fields, num_layers)
    mtp_layers = range(num_layers, num_layers + _num_mtp_layers(fields))

    def spec(layer: int, kind: str) -> LayerSpec:
        return _layer(fields, layer, kind, f"{prefix}layers.{layer}.mlp", numerics)

    mtp_specs = [replace(spec(layer, "sparse"), is_mtp=True) for layer in mtp_layers]
    return Family(
        model_type=config["model_type"],
        numerics=numerics,
        layers=tuple(spec(layer, kind) for layer, kind in enumerate(kinds)),
        ignore=_ignore_rules(mtp_layers),
        mtp_layers=tuple(mtp for mtp in mtp_specs if mtp.is_in(tensor_names)),
    )


def _refuse(fields: Fields, numerics: Numerics) -> None:
    fields.only("hidden_act", "silu", "the MLP is SwiGLU")
    fields.only("n_group", 1, "experts are selected without groups")
    fields.only("topk_group", 1, "experts are selected without groups")
    fields.only("scoring_func", "sigmoid", "the router of this family")
    fields.only("topk_method", "noaux_tc", "selection by score plus bias")
    fields.only("moe_layer_freq", 1, "mlp_layer_types says which layers are MoE")
    fields.check_router_dtype(numerics)


def _layer_kinds(fields: Fields, num_layers: int) -> tuple[str, ...]:
    if "mlp_layer_types" not in fields and "first_k_dense_replace" in fields:
        num_dense = min(fields.integer("first_k_dense_replace", low=0), num_layers)
        return ("dense",) * num_dense + ("sparse",) * (num_layers - num_dense)
    return fields.layer_types("mlp_layer_types", num_layers, _KINDS)


def _num_mtp_layers(fields: Fields) -> int:
    name = "num_nextn_predict_layers"
    return fields.integer(name, low=0) if name in fields else 1


def _layer(fields: Fields, layer: int, kind: str, block: str, numerics: Numerics) -> LayerSpec:
    hidden_size = fields.integer("hidden_size")
    limit = fields.swiglu_limit()
    if kind == "dense":
        names = TensorNames(block, _PROJECTIONS)
        size = fields.integer("intermediate_size")
        return LayerSpec(layer, "dense", names, hidden_size, size, limit)
    size = fields.integer("moe_intermediate_size")
    moe = MoEConfig(
        hidden_size=hidden_size,
        intermediate_size=size,
        num_experts=fields.integer("n_routed_experts"),
        top_k=fields.integer("num_experts_per_tok"),
        swiglu_limit=limit,
        numerics=numerics,
    )
    router = RouterConfig(
        score="sigmoid",
        factor=fields.number("routed_scaling_factor"),
        normalize=fields.flag("norm_topk_prob"),
    )
    return LayerSpec(
        layer=layer,
        kind="moe",
        names=TensorNames(
            block,
            _PROJECTIONS,
            router_weight=f"{block}.gate.weight",
            router_bias=f"{block}.gate.e_score_correction_bias",
        ),
        hidden_size=hidden_size,
        intermediate_size=size,
        swiglu_limit=limit,
        moe=moe,
        router=router,
        routing="score",
        shared_size=size * fields.integer("n_shared_experts"),
    )


def _ignore_rules(mtp_layers: Collection[int]) -> tuple[IgnoreRule, ...]:
    text = r"(?:model\.)?(?:language_model\.)?"
    layer = text + r"layers\.\d+\."
    mtp = [
        IgnoreRule(
            MTP_RULE,
            "multi-token prediction layer after the last layer: transformers builds none",
            text + rf"layers\.(?:{'|'.join(map(str, mtp_layers))})\..+",
        )
    ]
    return (
        *(mtp if mtp_layers else ()),
        IgnoreRule(
            "input_scale",
            "static activation scale: a16 quantises no activations, a8 computes its own scales",
            layer + r"mlp\..+[._]input_(?:global_)?scale",
        ),
        IgnoreRule(
            "kv_scale",
            "scale of a quantised key-value cache: the cache is not ours",
            layer + r"self_attn\.(?:.+\.)?(?:k|v|q|kv)_scale",
        ),
        IgnoreRule(
            "vision_tower",
            "vision tower: read by transformers",
            r"(?:model\.)?visual\..+",
        ),
        IgnoreRule(
            "attention",
            "attention, not an MLP tensor: read by transformers",
            layer + r"self_attn\..+",
        ),
        IgnoreRule(
            "hyper_connection",
            "residual streams, not an MLP tensor: read by transformers",
            layer + r"hc_(?:attn|ffn)_(?:fn|base|scale)",
        ),
        IgnoreRule(
            "norm",
            "norm, not an MLP tensor: read by transformers",
            rf"(?:{layer}(?:input|post_attention)_layernorm|{text}norm)\.weight",
        ),
        IgnoreRule(
            "embedding",
            "token embedding or output head, not an MLP tensor: read by transformers",
            rf"(?:{text}embed_tokens|{text}lm_head)\.weight",
        ),
    )
