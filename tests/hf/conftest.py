"""Tiny checkpoints of both families, packed by our quantisers, and the bf16 models that they were made from."""

import json
import os
import re
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from safetensors.torch import load_file, save_file

from exactmoe.formats import quantize

FAMILIES = ("glm5_next", "deepseek_v4")
FORMATS = {"glm5_next": "nvfp4", "deepseek_v4": "mxfp4"}


def tiny_config(family):
    """Four layers each: GLM one dense and three MoE, DeepSeek one hash and three score layers (class a8: 128s)."""
    common = {
        "vocab_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "n_routed_experts": 8,
        "n_shared_experts": 1, "num_experts_per_tok": 2, "q_lora_rank": 32, "index_n_heads": 2,
        "hc_mult": 2, "hc_sinkhorn_iters": 3, "max_position_embeddings": 512, "pad_token_id": 0,
        "bos_token_id": None, "eos_token_id": None, "initializer_range": 0.1,
    }  # fmt: skip
    if family == "glm5_next":
        from transformers import Glm5NextConfig

        text = common | {
            "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "num_key_value_heads": 4,
            "kv_lora_rank": 32, "qk_nope_head_dim": 16, "v_head_dim": 16, "qk_rope_head_dim": 0, "index_topk": 64,
            "index_head_dim": 16, "index_kpool": 4, "linear_head_dim": 16, "linear_num_heads": 4,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        }  # fmt: skip
        vision = {
            "depth": 1, "hidden_size": 32, "num_heads": 2, "image_size": 28, "patch_size": 14, "out_hidden_size": 64,
            "intermediate_size": 64, "projection_intermediate_size": 64,
        }  # fmt: skip
        specials = (
            "image_token_id",
            "video_token_id",
            "image_start_token_id",
            "image_end_token_id",
        )
        specials += ("video_start_token_id", "video_end_token_id")
        ids = {name: 250 + i for i, name in enumerate(specials)}
        return Glm5NextConfig(text_config=text, vision_config=vision, **ids)
    from transformers import DeepseekV4Config

    layer_types = ["sliding_attention", "compressed_sparse_attention"]
    layer_types += ["heavily_compressed_attention", "compressed_sparse_attention"]
    return DeepseekV4Config(
        **common, hidden_size=128, moe_intermediate_size=128, head_dim=32, o_groups=2, o_lora_rank=16,
        index_head_dim=32, index_topk=64, sliding_window=16, num_hash_layers=1, layer_types=layer_types,
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    )  # fmt: skip


def tiny_model(family):
    """A random model in bf16, with a hash table and correction biases that matter."""
    from exactmoe.hf import adapter

    torch.manual_seed(7)
    config = tiny_config(family)
    model = adapter.auto_class(config).from_config(config, dtype=torch.bfloat16).eval()
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):
            first = torch.randint(0, 8, buffer.shape[:1])
            buffer.copy_(torch.stack([first, (first + torch.randint(1, 8, first.shape)) % 8], 1))
        elif name.endswith("e_score_correction_bias"):
            # Close together at 7, as in published checkpoints: bf16 has 0.03 between neighbours there.
            buffer.data = 7 + 0.02 * torch.randn(buffer.shape)
    return model


def tensors_of(family, folder):
    """The tensors of a model as save_pretrained names them; DeepSeek's as the published checkpoints do."""
    tensors = load_file(folder / "model.safetensors")
    if family == "glm5_next":
        return tensors
    renamed = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("model.").replace("hc_head.hc_", "hc_head_")
        renamed[re.sub("^embed_tokens", "embed", name)] = tensor
    return renamed


def packed(family, tensors):
    """The tensors with the routed experts packed: ModelOpt NVFP4, or native DeepSeek-V4 (I8 and E8M0)."""
    out = {}
    for name, tensor in tensors.items():
        if not re.search(r"\.experts\.\d+\.", name):
            out[name] = tensor
            continue
        weight, base = quantize(tensor[None], FORMATS[family]), name.removesuffix("weight")
        if family == "glm5_next":
            out[name] = weight.codes[0]
            out[base + "weight_scale"] = weight.scales[0].view(torch.float8_e4m3fn)
            out[base + "weight_scale_2"] = weight.global_scale[0].clone()
            out[base + "input_scale"] = torch.tensor(0.5)
        else:
            out[name] = weight.codes[0].view(torch.int8)
            out[base + "scale"] = weight.scales[0].view(torch.float8_e8m0fnu)
    return out


def write_checkpoint(family, source, folder, change=lambda tensors: tensors):
    """A packed checkpoint in `folder`, two shards with an index; `change` may alter its tensors first."""
    tensors = change(packed(family, tensors_of(family, source)))
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    if family == "glm5_next":
        config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    else:
        config["expert_dtype"] = "fp4"
        config["quantization_config"] = {
            "quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128],
            "activation_scheme": "dynamic",
        }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file(
            {name: tensors[name].contiguous() for name in part},
            folder / file,
            metadata={"format": "pt"},
        )
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
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
def model(checkpoint):
    """The packed checkpoint, loaded; tests do not change it."""
    from exactmoe.hf import load_model

    return load_model(checkpoint, progress=False)
