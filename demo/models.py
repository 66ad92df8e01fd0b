"""The two demo architectures, their configs, and how their folders are written."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from corpus import BOS_ID, EOS_ID, PAD_ID, SPECIAL_TOKENS, VOCAB_SIZE
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    DeepseekV4Config,
    Glm5NextConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

FAMILIES = ("glm5_next", "deepseek_v4")
CONTEXT = 1024
TOKEN_IDS = {
    "vocab_size": VOCAB_SIZE,
    "pad_token_id": PAD_ID,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
}


def glm5_next_config() -> Glm5NextConfig:
    """Six layers: one dense MLP, five with 20 routed experts and a shared one; linear and full
    attention.
    """
    text = {
        **TOKEN_IDS,
        "hidden_size": 256,
        "intermediate_size": 384,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 6,
        "n_routed_experts": 20,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "mlp_layer_types": ["dense"] + ["sparse"] * 5,
        # "full_attention" is the one name for the indexed layers that every transformers version
        # accepts.
        "layer_types": ["linear_attention", "full_attention"] * 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 0,
        "v_head_dim": 64,
        # index_topk >= context: the indexer selects every position, because it gets no gradient.
        "index_topk": CONTEXT,
        "index_head_dim": 16,
        "index_n_heads": 2,
        "index_kpool": 16,
        "linear_head_dim": 32,
        "linear_num_heads": 8,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 4,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.03,
        "tie_word_embeddings": True,
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "num_heads": 1,
        "image_size": 28,
        "patch_size": 14,
        "out_hidden_size": 256,
        "intermediate_size": 32,
        "projection_intermediate_size": 32,
    }
    names = (
        "image_token_id",
        "video_token_id",
        "image_start_token_id",
        "image_end_token_id",
        "video_start_token_id",
        "video_end_token_id",
    )
    ids = {
        name: SPECIAL_TOKENS.index(f"<|{name.removesuffix('_id').removesuffix('_token')}|>")
        for name in names
    }
    return Glm5NextConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **ids)


def deepseek_v4_config() -> DeepseekV4Config:
    """Five layers of 24 routed experts and a shared one; the first routes by the hash table."""
    return DeepseekV4Config(
        **TOKEN_IDS,
        hidden_size=256,
        moe_intermediate_size=128,
        num_hidden_layers=5,
        n_routed_experts=24,
        num_experts_per_tok=4,
        n_shared_experts=1,
        mlp_layer_types=["hash_moe"] + ["moe"] * 4,
        layer_types=[
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
        ],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 32},
        num_attention_heads=8,
        head_dim=64,
        q_lora_rank=96,
        partial_rotary_factor=0.5,
        o_groups=2,
        o_lora_rank=64,
        sliding_window=128,
        # index_topk counts compressed entries; one per position is more than there can be.
        index_n_heads=2,
        index_head_dim=32,
        index_topk=CONTEXT,
        hc_mult=2,
        hc_sinkhorn_iters=4,
        routed_scaling_factor=1.5,
        swiglu_limit=10.0,
        num_nextn_predict_layers=0,
        max_position_embeddings=CONTEXT,
        initializer_range=0.03,
        tie_word_embeddings=True,
    )


def make_config(family: str) -> PreTrainedConfig:
    """Config of one of `FAMILIES`."""
    return {"glm5_next": glm5_next_config, "deepseek_v4": deepseek_v4_config}[family]()


def auto_class(family: str) -> type:
    """transformers' loading class: the GLM architecture is an image-text model."""
    return AutoModelForImageTextToText if family == "glm5_next" else AutoModelForCausalLM


def make_model(family: str) -> PreTrainedModel:
    """A freshly initialised f32 model."""
    return auto_class(family).from_config(make_config(family), dtype=torch.float32)


def load_original(folder: Path, **options: object) -> PreTrainedModel:
    """The bf16 model in `folder` (router bias, norms and the like stay f32, as transformers keeps
    them).
    """
    family = json.loads((folder / "config.json").read_text())["model_type"]
    return auto_class(family).from_pretrained(folder, dtype=torch.bfloat16, **options).eval()


def routers(model: PreTrainedModel) -> dict[str, torch.nn.Module]:
    """Module name -> router of every MoE layer, in layer order."""
    return {
        name: module
        for name, module in model.named_modules()
        if name.endswith("mlp.gate") and hasattr(module, "top_k")
    }


def run_in_f32(module: torch.nn.Module) -> None:
    """Run `module` on f32 inputs, outside autocast: the choice of experts and the mixing of streams
    need it.
    """
    stock = module.forward

    def forward(*inputs: torch.Tensor) -> object:
        with torch.autocast(inputs[0].device.type, enabled=False):
            return stock(*(x.float() if x.is_floating_point() else x for x in inputs))

    module.forward = forward


def balanced_table(counts: np.ndarray, num_experts: int, top_k: int) -> torch.Tensor:
    """Hash table (vocab, top_k) of distinct expert ids whose load is even under the token `counts`
    (vocab,).
    """
    generator = np.random.default_rng(0)
    load = np.zeros(num_experts)
    table = np.zeros((len(counts), top_k), dtype=np.int64)
    for token in np.argsort(-counts, kind="stable"):
        # The least loaded experts; the noise breaks ties, so that equal tokens do not share all
        # experts.
        order = np.argsort(load + generator.random(num_experts) * (counts.mean() + 1))
        table[token] = order[:top_k]
        load[order[:top_k]] += counts[token]
    return torch.from_numpy(table)


def fill_hash_tables(model: PreTrainedModel, counts: np.ndarray) -> None:
    """Fill every all-zero `tid2eid` of `model` in place."""
    for router in routers(model).values():
        if hasattr(router, "tid2eid"):
            router.tid2eid.copy_(balanced_table(counts, router.num_experts, router.top_k))


def save_original(model: PreTrainedModel, tokenizer_folder: Path, folder: Path) -> None:
    """Write an f32 `model` as a bf16 folder with tokenizer and a config that old and new
    transformers read.
    """
    with TemporaryDirectory() as exact:
        model.save_pretrained(exact)
        # A second pass through the loader rounds to bf16 exactly what the architecture does not
        # keep in f32.
        load_original(Path(exact)).save_pretrained(folder, max_shard_size="15MB")
    write_config(model.config.model_type, folder)
    AutoTokenizer.from_pretrained(tokenizer_folder).save_pretrained(folder)


def write_config(family: str, folder: Path) -> None:
    """Rewrite the names of GLM's indexed layers in config.json to the one that every version
    accepts.
    """
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if family == "glm5_next":
        types = make_config(family).text_config.layer_types
        config["text_config"]["layer_types"] = [
            kind if kind == "linear_attention" else "full_attention" for kind in types
        ]
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
