"""What transformers writes is what the families expect: every tensor has its place."""

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DeepseekV4Config,
    Glm5NextConfig,
    PreTrainedModel,
)

from exactmoe.checkpoint import Checkpoint, audit, read_dense, read_moe

TEXT = {
    "vocab_size": 32,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "q_lora_rank": 32,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 64,
    "hc_mult": 2,
    "pad_token_id": 0,
}


def _glm() -> PreTrainedModel:
    text = {
        **TEXT,
        "intermediate_size": 48,
        "mlp_layer_types": ["dense", "sparse"],
        "layer_types": ["linear_attention", "full_attention"],
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "index_kpool": 16,
        "linear_head_dim": 16,
        "linear_num_heads": 2,
    }
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "num_heads": 2,
        "image_size": 28,
        "out_hidden_size": 64,
        "intermediate_size": 32,
        "projection_intermediate_size": 32,
    }
    config = Glm5NextConfig(text_config=text, vision_config=vision)
    return AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)


def _deepseek() -> PreTrainedModel:
    config = DeepseekV4Config(
        **TEXT,
        mlp_layer_types=["hash_moe", "moe"],
        layer_types=["sliding_attention", "compressed_sparse_attention"],
        num_attention_heads=4,
        head_dim=32,
        o_groups=2,
        o_lora_rank=16,
        sliding_window=16,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def _save(model: PreTrainedModel, path: Path) -> Checkpoint:
    model.save_pretrained(path, max_shard_size="100KB")
    checkpoint = Checkpoint(path)
    audit(checkpoint).require_clean()
    return checkpoint


def _require_experts(checkpoint: Checkpoint, experts: torch.nn.Module) -> None:
    """Routed experts against the fused parameters of transformers: gate first, then up."""
    bank = read_moe(checkpoint, 1).bank
    gate, up = experts.gate_up_proj.chunk(2, dim=1)  # type: ignore[union-attr,operator]
    for found, expected in ((bank.gate, gate), (bank.up, up), (bank.down, experts.down_proj)):
        assert found.format == "bf16"
        assert torch.equal(found.codes, expected)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore")
def test_glm(tmp_path: Path) -> None:
    model = _glm()
    checkpoint = _save(model, tmp_path)
    dense, moe = (layer.mlp for layer in model.model.language_model.layers)
    _require_experts(checkpoint, moe.experts)
    assert torch.equal(read_dense(checkpoint, 0).gate.codes[0], dense.gate_proj.weight)
    assert torch.equal(read_moe(checkpoint, 1).router.weight, moe.gate.weight)


@pytest.mark.filterwarnings("ignore")
def test_deepseek(tmp_path: Path) -> None:
    model = _deepseek()
    hashed, scored = (layer.mlp for layer in model.model.layers)
    hashed.gate.tid2eid.copy_(torch.arange(64).view(32, 2) % 4)
    checkpoint = _save(model, tmp_path)
    _require_experts(checkpoint, scored.experts)
    router = read_moe(checkpoint, 0).router
    assert torch.equal(router.table, hashed.gate.tid2eid)  # type: ignore[arg-type]
    shared = read_moe(checkpoint, 1).shared
    assert shared is not None
    assert torch.equal(shared.up.codes[0], scored.shared_experts.up_proj.weight)
