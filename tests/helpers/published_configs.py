"""config.json of published models: geometry and quantisation only, as their makers give them."""

from typing import Any


def glm_5_3_flash() -> dict[str, Any]:
    """GLM-5.3-Flash as ModelOpt NVFP4: 45 layers, the first three dense."""
    text = {
        "model_type": "glm5_next_text",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 45,
        "first_k_dense_replace": 3,
        "n_routed_experts": 288,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "swiglu_limit": 10.0,
        "hidden_act": "silu",
        "vocab_size": 154624,
    }
    quantization = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    return {"model_type": "glm5_next", "text_config": text, "quantization_config": quantization}


def deepseek_v4_flash() -> dict[str, Any]:
    """DeepSeek-V4-Flash as published: MXFP4 experts, all else FP8, 43 layers of experts."""
    return {
        "model_type": "deepseek_v4",
        "hidden_size": 4096,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 43,
        "num_hash_layers": 3,
        "n_routed_experts": 256,
        "num_experts_per_tok": 6,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "swiglu_limit": 10.0,
        "hidden_act": "silu",
        "vocab_size": 129280,
        "expert_dtype": "fp4",
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        },
    }
