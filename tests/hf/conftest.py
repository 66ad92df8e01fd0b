"""Tiny checkpoints of both families, packed by our quantisers, and the bf16 models behind them."""

import json
import os
import re
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from safetensors.torch import load_file, save_file

from exactmoe.formats import quantize
from native_checkpoints import fp8_parts

FAMILIES = ("glm5_next", "deepseek_v4")
FORMATS = {"glm5_next": "nvfp4", "deepseek_v4": "mxfp4"}

COMMON = {
    "vocab_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "q_lora_rank": 32,
    "index_n_heads": 2,
    "index_topk": 64,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 3,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.1,
}
# One dense layer and three MoE layers.
GLM_TEXT = COMMON | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "qk_rope_head_dim": 0,
    "index_head_dim": 16,
    "index_kpool": 4,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
}
GLM_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "num_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "out_hidden_size": 64,
    "intermediate_size": 64,
    "projection_intermediate_size": 64,
}
GLM_SPECIALS = {
    "image_token_id": 250,
    "video_token_id": 251,
    "image_start_token_id": 252,
    "image_end_token_id": 253,
    "video_start_token_id": 254,
    "video_end_token_id": 255,
}
# One hash layer and three score layers; class a8 asks for multiples of 128.
DEEPSEEK = COMMON | {
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    "head_dim": 32,
    "o_groups": 2,
    "o_lora_rank": 16,
    "index_head_dim": 32,
    "sliding_window": 16,
    "num_hash_layers": 1,
    "layer_types": [
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
    ],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
}


def tiny_config(family):
    from transformers import DeepseekV4Config, Glm5NextConfig

    if family == "deepseek_v4":
        return DeepseekV4Config(**DEEPSEEK)
    return Glm5NextConfig(text_config=GLM_TEXT, vision_config=GLM_VISION, **GLM_SPECIALS)


def tiny_model(family):
    """A random model in bf16, with a hash table and correction biases that matter."""
    from exactmoe.hf import adapter

    torch.manual_seed(7)
    config = tiny_config(family)
    model = adapter.auto_class(config).from_config(config, dtype=torch.bfloat16).eval()
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):
            first = torch.randint(0, 8, buffer.shape[:1])
            second = (first + torch.randint(1, 8, first.shape)) % 8
            buffer.copy_(torch.stack([first, second], 1))
        elif name.endswith("e_score_correction_bias"):
            # Around 7, as in published checkpoints, where bf16 has steps of 0.03.
            buffer.data = 7 + 0.02 * torch.randn(buffer.shape)
    return model


def tensors_of(family, folder):
    """The tensors that save_pretrained wrote; DeepSeek's by their published names."""
    tensors = load_file(folder / "model.safetensors")
    if family == "glm5_next":
        return tensors
    renamed = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("model.").replace("hc_head.hc_", "hc_head_")
        renamed[re.sub("^embed_tokens", "embed", name)] = tensor
    return renamed


def pack(family, name, tensor):
    """One projection: ModelOpt NVFP4 with an input_scale, or native DeepSeek-V4 (I8 and E8M0)."""
    weight, base = quantize(tensor[None], FORMATS[family]), name.removesuffix("weight")
    if family == "glm5_next":
        return {
            name: weight.codes[0],
            base + "weight_scale": weight.scales[0].view(torch.float8_e4m3fn),
            base + "weight_scale_2": weight.global_scale[0].clone(),
            base + "input_scale": torch.tensor(0.5),
        }
    scales = weight.scales[0].view(torch.float8_e8m0fnu)
    return {name: weight.codes[0].view(torch.int8), base + "scale": scales}


def routed(name):
    return re.search(r"\.experts\.\d+\.", name) is not None


def write_checkpoint(family, source, folder, *, packed=routed, change=None, config_change=None):
    """A packed checkpoint in `folder`: two shards and an index.

    packed(name) says which tensors are packed; change(tensors) and config_change(config) may alter
    what is written.
    """
    tensors = {}
    for name, tensor in tensors_of(family, source).items():
        tensors |= pack(family, name, tensor) if packed(name) else {name: tensor}
    config = json.loads((source / "config.json").read_text())
    if family == "glm5_next":
        config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    else:
        config["expert_dtype"] = "fp4"
        config["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
            "activation_scheme": "dynamic",
        }
    for alter, what in ((change, tensors), (config_change, config)):
        if alter is not None:
            alter(what)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names, weight_map = sorted(tensors), {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        shard = {name: tensors[name].contiguous() for name in part}
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture(scope="session")
def sources(tmp_path_factory):
    """Folder of the bf16 model of each family."""
    folders = {}
    for family in FAMILIES:
        folders[family] = tmp_path_factory.mktemp(family)
        tiny_model(family).save_pretrained(folders[family])
    return folders


@pytest.fixture(scope="session", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="session")
def checkpoint(family, sources, tmp_path_factory) -> Path:
    """Folder of a packed checkpoint."""
    return write_checkpoint(family, sources[family], tmp_path_factory.mktemp(f"{family}_packed"))


@pytest.fixture(scope="session")
def native(family, sources, tmp_path_factory) -> Path:
    """Folder of a packed checkpoint whose attention and shared experts are FP8, as published."""
    folder = tmp_path_factory.mktemp(f"{family}_native")
    return write_checkpoint(family, sources[family], folder, change=fp8_parts(family))


@pytest.fixture
def write(family, sources, tmp_path):
    """Writes another packed checkpoint, altered as the arguments say."""

    def write_altered(**how):
        return write_checkpoint(family, sources[family], tmp_path / "altered", **how)

    return write_altered


@pytest.fixture(scope="session")
def model(checkpoint):
    """The packed checkpoint, loaded. Tests do not change it."""
    from exactmoe.hf import load_model

    return load_model(checkpoint, progress=False)


@pytest.fixture
def token_ids(rng):
    """One prompt [1, 21]."""
    return torch.randint(1, 249, (1, 21), generator=rng)
