"""Writes small checkpoints whose every value is known, in the layouts that are published."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

Tensors = dict[str, Tensor]

E2M1 = torch.tensor(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64
)


def glm_config(**changes: Any) -> dict[str, Any]:
    """Two layers: a dense one of width 48, and one with 4 experts; H = 64, I = 32, K = 2."""
    text = {
        "model_type": "glm5_next_text",
        "hidden_size": 64,
        "intermediate_size": 48,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "mlp_layer_types": ["dense", "sparse"],
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "swiglu_limit": 10.0,
        "hidden_act": "silu",
        "vocab_size": 10,
    }
    return {"model_type": "glm5_next", "text_config": {**text, **changes}}


def deepseek_config(**changes: Any) -> dict[str, Any]:
    """Two layers of 4 experts, the first routed by the hash table; H = I = 128, K = 2."""
    config = {
        "model_type": "deepseek_v4",
        "hidden_size": 128,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 2,
        "mlp_layer_types": ["hash_moe", "moe"],
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus",
        "swiglu_limit": 10.0,
        "hidden_act": "silu",
        "vocab_size": 10,
    }
    return {**config, **changes}


def bf16(rng: torch.Generator, *shape: int) -> Tensor:
    """Normal values."""
    return torch.randn(shape, generator=rng).bfloat16()


def _bytes(rng: torch.Generator, low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=rng, dtype=torch.int32).to(torch.uint8)


def modelopt(
    rng: torch.Generator, base: str, rows: int, columns: int, global_scale: Tensor
) -> Tensors:
    """One projection as Model Optimizer writes it, every code byte and any legal block scale."""
    scales = _bytes(rng, 0, 127, rows, columns // 16)
    return {
        f"{base}.weight": _bytes(rng, 0, 256, rows, columns // 2),
        f"{base}.weight_scale": scales.view(torch.float8_e4m3fn),
        f"{base}.weight_scale_2": global_scale,
    }


def native(rng: torch.Generator, base: str, rows: int, columns: int) -> Tensors:
    """One projection as DeepSeek-V4 stores it, scales 2^-37 ... 2^23."""
    scales = _bytes(rng, 90, 150, rows, columns // 32)
    return {
        f"{base}.weight": _bytes(rng, 0, 256, rows, columns // 2).view(torch.int8),
        f"{base}.scale": scales.view(torch.float8_e8m0fnu),
    }


def plain(rng: torch.Generator, base: str, rows: int, columns: int) -> Tensors:
    """One projection in bf16."""
    return {f"{base}.weight": bf16(rng, rows, columns)}


def decode_modelopt(tensors: Tensors, base: str) -> Tensor:
    """True values float64 [N, K] of a projection, from the checkpoint's tensors alone."""
    scales = tensors[f"{base}.weight_scale"].double().repeat_interleave(16, -1)
    codes = tensors[f"{base}.weight"]
    return _values(codes) * scales * tensors[f"{base}.weight_scale_2"].double()


def decode_native(tensors: Tensors, base: str) -> Tensor:
    """True values float64 [N, K] of a projection, from the checkpoint's tensors alone."""
    exponents = tensors[f"{base}.scale"].view(torch.uint8).double() - 127
    scales = torch.pow(2.0, exponents).repeat_interleave(32, -1)
    return _values(tensors[f"{base}.weight"].view(torch.uint8)) * scales


def _values(codes: Tensor) -> Tensor:
    values = torch.zeros(codes.shape[0], codes.shape[1] * 2, dtype=torch.float64)
    values[:, 0::2] = E2M1[(codes % 16).long()]
    values[:, 1::2] = E2M1[(codes // 16).long()]
    return values


def glm_tensors(rng: torch.Generator, prefix: str = "model.language_model.") -> Tensors:
    """All tensors of `glm_config()`: NVFP4 experts, bf16 dense parts, some for every rule."""
    dense, moe = f"{prefix}layers.0.mlp", f"{prefix}layers.1.mlp"
    tensors: Tensors = {}
    for name, size in (("gate_proj", (48, 64)), ("up_proj", (48, 64)), ("down_proj", (64, 48))):
        tensors |= plain(rng, f"{dense}.{name}", *size)
    for name, size in (("gate_proj", (32, 64)), ("up_proj", (32, 64)), ("down_proj", (64, 32))):
        tensors |= plain(rng, f"{moe}.shared_experts.{name}", *size)
        for expert in range(4):
            # gate and up differ, the shape is () in some exports and [1] in others
            scale = torch.rand(1 if expert % 2 else (), generator=rng) + 1e-3
            base = f"{moe}.experts.{expert}.{name}"
            tensors |= modelopt(rng, base, *size, scale)
            tensors[f"{base}.input_scale"] = torch.tensor(1.0)
    tensors[f"{moe}.gate.weight"] = bf16(rng, 4, 64)
    tensors[f"{moe}.gate.e_score_correction_bias"] = torch.randn(4, generator=rng)
    others = {
        f"{prefix}embed_tokens.weight": (10, 64),
        f"{prefix}norm.weight": (64,),
        "lm_head.weight": (10, 64),
        "model.visual.blocks.0.mlp.gate_proj.weight": (8, 8),
        # the multi-token prediction layer, with MLP tensors of its own
        f"{prefix}layers.2.mlp.experts.0.gate_proj.weight": (32, 64),
        f"{prefix}layers.2.shared_head.norm.weight": (64,),
    }
    for layer in (0, 1):
        others |= {
            f"{prefix}layers.{layer}.input_layernorm.weight": (64,),
            f"{prefix}layers.{layer}.post_attention_layernorm.weight": (64,),
            f"{prefix}layers.{layer}.self_attn.o_proj.weight": (64, 64),
            f"{prefix}layers.{layer}.self_attn.k_proj.k_scale": (),
            f"{prefix}layers.{layer}.hc_attn_fn": (8, 64),
        }
    return tensors | {name: bf16(rng, *size) for name, size in others.items()}


def deepseek_tensors(rng: torch.Generator, prefix: str = "") -> Tensors:
    """All tensors of `deepseek_config()`: native MXFP4 experts, bf16 shared experts, the rest."""
    tensors: Tensors = {}
    for layer in (0, 1):
        ffn = f"{prefix}layers.{layer}.ffn"
        for name in ("w1", "w2", "w3"):
            tensors |= plain(rng, f"{ffn}.shared_experts.{name}", 128, 128)
            for expert in range(4):
                tensors |= native(rng, f"{ffn}.experts.{expert}.{name}", 128, 128)
        tensors[f"{ffn}.gate.weight"] = bf16(rng, 4, 128)
    # ids may repeat in a row
    table = torch.randint(0, 4, (10, 2), generator=rng)
    tensors[f"{prefix}layers.0.ffn.gate.tid2eid"] = table
    tensors[f"{prefix}layers.1.ffn.gate.bias"] = torch.randn(4, generator=rng)
    others = {
        f"{prefix}embed.weight" if not prefix else "model.embed_tokens.weight": (10, 128),
        "head.weight" if not prefix else "lm_head.weight": (10, 128),
        f"{prefix}norm.weight": (128,),
        "hc_head_fn" if not prefix else "model.hc_head.hc_fn": (2, 128),
        "mtp.0.ffn.experts.0.w1.weight": (128, 128),
    }
    for layer in (0, 1):
        others |= {
            f"{prefix}layers.{layer}.attn_norm.weight": (128,),
            f"{prefix}layers.{layer}.ffn_norm.weight": (128,),
            f"{prefix}layers.{layer}.attn.wo_a.weight": (16, 128),
            f"{prefix}layers.{layer}.hc_ffn_base": (8,),
        }
    return tensors | {name: bf16(rng, *size) for name, size in others.items()}


def write(path: Path, config: dict[str, Any], tensors: Tensors, shards: int = 0) -> Path:
    """Writes a folder: one file, or `shards` files and an index."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if not shards:
        save_file(_contiguous(tensors), path / "model.safetensors")
        return path
    weight_map = {}
    for number in range(shards):
        names = sorted(tensors)[number::shards]
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        save_file(_contiguous({name: tensors[name] for name in names}), path / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def _contiguous(tensors: Tensors) -> Tensors:
    return {
        name: tensor.clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
