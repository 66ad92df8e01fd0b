"""config.json of the output: the quantization_config that vLLM reads for its dialect.

Which words vLLM reads: its layers/quantization/modelopt.py ("W4A16_NVFP4" without activation
scales, "NVFP4" with them, "ignore" as wildcards), compressed_tensors/, and for DeepSeek-V4
models/deepseek_v4/quant_config.py ("fp8" with `moe_quant_algo`), as of vLLM 0.32.
"""

import copy
import re
from collections.abc import Iterable
from typing import Any

from exactmoe.checkpoint.dialects import (
    COMPRESSED_TENSORS_MXFP4,
    COMPRESSED_TENSORS_NVFP4,
    MODELOPT_NVFP4,
    Dialect,
)
from exactmoe.checkpoint.index import Checkpoint
from exactmoe.checkpoint.rewrite.units import INPUT_SCALES, Rewriting

_CT = (COMPRESSED_TENSORS_NVFP4, COMPRESSED_TENSORS_MXFP4)


def quant_method(config: dict[str, Any]) -> str | None:
    """The quant_method of a config.json, wherever it stands."""
    for part in (config, config.get("text_config") or {}):
        found = part.get("quantization_config")
        if isinstance(found, dict):
            return found.get("quant_method")
    return None


def is_deepseek_fp8(checkpoint: Checkpoint) -> bool:
    """DeepSeek-V4 as published: one config for FP8 dense parts and for FP4 experts."""
    deepseek = checkpoint.family.model_type == "deepseek_v4"
    return deepseek and quant_method(checkpoint.config) == "fp8"


def output_config(checkpoint: Checkpoint, target: Dialect, rewriting: Rewriting) -> dict[str, Any]:
    """config.json of a checkpoint whose packed weights are in the dialect `target`."""
    config = copy.deepcopy(checkpoint.config)
    if is_deepseek_fp8(checkpoint) and target not in _CT:
        quantization = config["quantization_config"]
        quantization.pop("moe_quant_algo", None)
        if target is MODELOPT_NVFP4:
            quantization["moe_quant_algo"] = "NVFP4"
        config["expert_dtype"] = "fp4"
        return config
    if isinstance(config.get("text_config"), dict):
        config["text_config"].pop("quantization_config", None)
    old = config.get("quantization_config")
    kept = [name for name in checkpoint.tensors if name not in rewriting.replaced]
    names = set(kept) | {e.name for u in rewriting.units for p in u.projections for e in p.extra}
    scaled = any(name.rpartition(".")[2] in INPUT_SCALES for name in names)
    matrices = [name for name in kept if len(checkpoint.tensors[name].shape) > 1]
    ignore = ignored_modules(matrices, "re:{}.*" if target in _CT else "{}*")
    made = _compressed(target, scaled) if target in _CT else _modelopt(scaled)
    cache = old.get("kv_cache_scheme") if isinstance(old, dict) else None
    if cache is not None:
        made["kv_cache_scheme"] = cache
    config["quantization_config"] = {**made, "ignore": ignore}
    return config


def _modelopt(scaled: bool) -> dict[str, Any]:
    four = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
    group = {"weights": four, "input_activations": four if scaled else None, "targets": ["Linear"]}
    return {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4" if scaled else "W4A16_NVFP4",
        "group_size": 16,
        "config_groups": {"group_0": group},
    }


def _compressed(target: Dialect, scaled: bool) -> dict[str, Any]:
    is_nvfp4 = target is COMPRESSED_TENSORS_NVFP4
    four: dict[str, Any] = {"num_bits": 4, "type": "float", "symmetric": True}
    if is_nvfp4:
        format = "nvfp4-pack-quantized"
        weights = {**four, "strategy": "tensor_group", "group_size": 16, "dynamic": False}
    else:
        format = "mxfp4-pack-quantized"
        weights = {**four, "strategy": "group", "group_size": 32, "dynamic": False}
        weights["scale_dtype"] = "torch.uint8"
    activations = {**four, "strategy": "tensor_group", "group_size": 16, "dynamic": "local"}
    group = {
        "targets": ["Linear"],
        "format": format,
        "weights": weights,
        "input_activations": activations if scaled and is_nvfp4 else None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
    }


def ignored_modules(kept: Iterable[str], wildcard: str) -> list[str]:
    """Modules of unquantised weights, sorted; routed experts and layers as one wildcard each.

    Args:
        kept: names of the matrices that are copied.
        wildcard: pattern for everything below a module.
    """
    packed, plain = set(), set()
    for name in kept:
        base, _, leaf = name.rpartition(".")
        if leaf in ("weight_scale", "weight_packed", "scale"):
            packed.add(base)
        elif leaf == "weight":
            plain.add(base)
        elif re.search(r"\.experts\.(?:gate_up|down)_proj$", name):
            plain.add(name)
    modules = set()
    for base in plain - packed:
        experts = re.match(r"(.+\.experts)\.", base)
        if experts is None:
            modules.add(base)
        elif wildcard.startswith("re:"):
            modules.add(wildcard.format(re.escape(experts[1])))
        else:
            modules.add(wildcard.format(experts[1]))
    return sorted(modules)
