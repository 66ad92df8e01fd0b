"""DeepSeek-V4: MoE in every layer, the first ones routed by a hash table; class `a8`.

Geometry: transformers, models/deepseek_v4/configuration_deepseek_v4.py. Tensor names: the published
checkpoints ("layers.3.ffn..."); save_pretrained writes the same names after "model.", and other
names for embedding and head. w1 is gate, w3 up, w2 down (transformers, conversion_mapping.py).
The MTP blocks "mtp.0...", "mtp.1..." count as layers after the last one, routed by score.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from exactmoe.config import MoEConfig, Numerics, RouterConfig
from exactmoe.families.fields import Fields
from exactmoe.families.spec import MTP_RULE, Family, IgnoreRule, LayerSpec, TensorNames

MODEL_TYPES = ("deepseek_v4",)
# Before "layers.": the published checkpoints, and what save_pretrained writes.
PREFIXES = ("", "model.")
NUMERICS = "a8"

_PROJECTIONS = {"gate": "w1", "up": "w3", "down": "w2"}
_ROUTING = {"hash_moe": "hash", "moe": "score"}
_SCORES = {"sqrtsoftplus": "sqrt_softplus", "sigmoid": "sigmoid"}


def family(
    config: Mapping[str, Any],
    prefix: str,
    numerics: Numerics,
    tensor_names: Collection[str] | None = None,
) -> Family:
    """The family of a config dict."""
    fields = Fields(config, config["model_type"])
    _refuse(fields, numerics)
    kinds = _layer_kinds(fields, fields.integer("num_hidden_layers"))
    num_mtp = _num_mtp_layers(fields, prefix, tensor_names)
    mtp = [
        _layer(fields, len(kinds) + block, "score", f"{prefix}mtp.{block}.ffn", numerics)
        for block in range(num_mtp)
    ]
    return Family(
        model_type=config["model_type"],
        numerics=numerics,
        layers=tuple(
            _layer(fields, layer, _ROUTING[kind], f"{prefix}layers.{layer}.ffn", numerics)
            for layer, kind in enumerate(kinds)
        ),
        ignore=IGNORE_RULES,
        mtp_layers=tuple(replace(spec, is_mtp=True) for spec in mtp),
    )


def _num_mtp_layers(fields: Fields, prefix: str, tensor_names: Collection[str] | None) -> int:
    """Those that the checkpoint has: drafters of several blocks come under configs that say 1."""
    if tensor_names is None:
        name = "num_nextn_predict_layers"
        return fields.integer(name, low=0) if name in fields else 1
    pattern = re.compile(re.escape(prefix) + r"mtp\.(\d+)\.ffn\.")
    return max((int(m[1]) + 1 for name in tensor_names if (m := pattern.match(name))), default=0)


def _refuse(fields: Fields, numerics: Numerics) -> None:
    fields.only("hidden_act", "silu", "the MLP is SwiGLU")
    fields.only("n_group", 1, "experts are selected without groups")
    fields.only("topk_group", 1, "experts are selected without groups")
    fields.only("topk_method", "noaux_tc", "selection by score plus bias")
    fields.only("mlp_bias", False, "the shared expert has no bias")
    # transformers and the published code build one shared expert whatever this says.
    fields.only("n_shared_experts", 1, "the family has one shared expert")
    fields.check_router_dtype(numerics)


def _layer_kinds(fields: Fields, num_layers: int) -> tuple[str, ...]:
    if "mlp_layer_types" not in fields and "num_hash_layers" in fields:
        num_hash = min(fields.integer("num_hash_layers", low=0), num_layers)
        return ("hash_moe",) * num_hash + ("moe",) * (num_layers - num_hash)
    return fields.layer_types("mlp_layer_types", num_layers, tuple(_ROUTING))


def _layer(fields: Fields, layer: int, routing: str, block: str, numerics: Numerics) -> LayerSpec:
    size = fields.integer("moe_intermediate_size")
    moe = MoEConfig(
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=size,
        num_experts=fields.integer("n_routed_experts"),
        top_k=fields.integer("num_experts_per_tok"),
        swiglu_limit=fields.swiglu_limit(),
        numerics=numerics,
    )
    router = RouterConfig(
        score=fields.choice("scoring_func", _SCORES),
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
            router_bias=f"{block}.gate.bias" if routing == "score" else None,
            router_table=f"{block}.gate.tid2eid" if routing == "hash" else None,
        ),
        hidden_size=moe.hidden_size,
        intermediate_size=size,
        swiglu_limit=moe.swiglu_limit,
        moe=moe,
        router=router,
        routing=routing,
        shared_size=size,
        vocab_size=fields.integer("vocab_size"),
    )


_TEXT = r"(?:model\.)?"
_LAYER = _TEXT + r"(?:layers|mtp)\.\d+\."

IGNORE_RULES = (
    IgnoreRule(
        MTP_RULE,
        "multi-token prediction block: transformers builds none",
        _TEXT + r"mtp\.\d+\..+",
    ),
    IgnoreRule(
        "input_scale",
        "static activation scale: a16 quantises no activations, a8 computes its own scales",
        _LAYER + r"ffn\..+[._]input_(?:global_)?scale",
    ),
    IgnoreRule(
        "kv_scale",
        "scale of a quantised key-value cache: the cache is not ours",
        _LAYER + r"attn\.(?:.+\.)?(?:k|v|q|kv)_scale",
    ),
    IgnoreRule(
        "attention",
        "attention, not an MLP tensor: read by transformers",
        _LAYER + r"attn\..+",
    ),
    IgnoreRule(
        "hyper_connection",
        "residual streams, not an MLP tensor: read by transformers",
        rf"(?:{_LAYER}hc_(?:attn|ffn)_|{_TEXT}hc_head_|{_TEXT}hc_head\.hc_)(?:fn|base|scale)",
    ),
    IgnoreRule(
        "norm",
        "norm, not an MLP tensor: read by transformers",
        rf"(?:{_LAYER}(?:attn|ffn)_norm|{_TEXT}norm)\.weight",
    ),
    IgnoreRule(
        "embedding",
        "token embedding or output head, not an MLP tensor: read by transformers",
        rf"{_TEXT}(?:embed|head|embed_tokens|lm_head)\.weight",
    ),
)
