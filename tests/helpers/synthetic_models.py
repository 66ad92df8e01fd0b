"""A whole GLM-5-Next of any size for transformers: synthetic MLP blocks, and a small attention."""

import copy
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import Glm5NextConfig

from exactmoe.checkpoint.header import read_header
from exactmoe.checkpoint.rewrite.files import Entry
from exactmoe.hf import adapter
from synthetic_checkpoints import Synthetic, write_synthetic

_KINDS = {"BF16": "bf16", "F32": "scale"}
_TEXT = {
    "vocab_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 0,
    "v_head_dim": 16,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 64,
    "index_kpool": 4,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 3,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "num_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "intermediate_size": 64,
    "projection_intermediate_size": 64,
}


def write_model(path: Path, synthetic: Synthetic) -> Path:
    """Writes a folder that load_model loads; `synthetic` is of family glm5_next, as ModelOpt."""
    own = synthetic.config()
    config = Glm5NextConfig(
        text_config=_TEXT | own.get("text_config", own),
        vision_config=_VISION | {"out_hidden_size": synthetic.hidden_size},
        image_token_id=250,
        video_token_id=251,
    )
    with TemporaryDirectory() as folder:
        # transformers' own names of what is no MLP block: from a model with two tiny experts.
        small = copy.deepcopy(config)
        small.text_config.n_routed_experts, small.text_config.moe_intermediate_size = 2, 16
        model = adapter.auto_class(small).from_config(small, dtype=torch.bfloat16)
        model.save_pretrained(folder)
        del model
        infos = read_header(Path(folder), "model.safetensors")
    others = [
        (Entry(info.name, info.dtype, info.shape), _KINDS[info.dtype])
        for info in infos
        if not re.search(r"\.layers\.\d+\.mlp\.", info.name)
    ]
    content: dict[str, Any] = {**config.to_dict(), "dtype": "bfloat16"}
    content["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    return write_synthetic(path, synthetic, others, content)
