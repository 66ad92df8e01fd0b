"""What `experts_implementation="exactmoe"` runs: an experts class of transformers, tried alone."""

import importlib
import inspect
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from exactmoe.errors import Unsupported
from exactmoe.hf import adapter, experts

# Model types; a transformers may be too old for some.
MODEL_TYPES = (
    "aria",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "deepseek_v4",
    "dots1",
    "ernie4_5_moe",
    "gemma4",
    "glm4_moe",
    "glm4_moe_lite",
    "glm4v_moe",
    "glm5_next",
    "glm_moe_dsa",
    "gpt_oss",
    "granitemoe",
    "hy_v3",
    "hy_v4",
    "inkling2",
    "kimi_linear",
    "lfm2_moe",
    "minimax_m2",
    "minimax_m3_vl",
    "mistral4",
    "mixtral",
    "muse_spark",
    "nemotron_h",
    "olmoe",
    "openai_privacy_filter",
    "phimoe",
    "qwen2_moe",
    "qwen3_5_moe",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_vl_moe",
    "solar_open",
)
RUNS = "runs"
# Words of the refusals -> what the table says.
REASONS = {
    "is_transposed = True": "weights as [E, inputs, outputs], or biases",
    "has_gate = False": "experts without a gate",
    "has_post_expert_norm = True": "a norm after every expert",
    "computes its gate by": "a gate of its own",
    "has activation": "another activation than SiLU",
}
HIDDEN, INNER, EXPERTS, TOP_K, TOKENS = 64, 32, 4, 2, 5
_SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "moe_intermediate_size": INNER,
    "expert_intermediate_size": INNER,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "moe_num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "top_k_experts": TOP_K,
}


def outcome(model_type: str) -> str | None:
    """RUNS, or why not; None where this transformers has no such model.

    A class that runs is compared with transformers' own code in float64; AssertionError otherwise.
    """
    found = _experts_class(model_type)
    if found is None:
        return None
    config = _config(model_type)
    torch.manual_seed(5)
    module = found(config)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.1)
    module = module.bfloat16().requires_grad_(False)
    x = torch.randn(TOKENS, module.down_proj.shape[1]).bfloat16()
    ids = torch.rand(TOKENS, EXPERTS).argsort(1)[:, :TOP_K]
    weights = torch.rand(TOKENS, TOP_K)
    try:
        y = _run(module, experts.NAME, x, ids, weights)
    except Unsupported as error:
        assert found.__name__ in str(error), f"{found.__name__} is not named in: {error}"
        return next(reason for words, reason in REASONS.items() if words in str(error))
    expected = _run(module.double(), "eager", x.double(), ids, weights.double())
    difference = float((y.double() - expected).norm() / expected.norm())
    assert difference < 2.0**-7, f"{model_type}: relative error {difference}"
    return RUNS


def _run(module: Any, implementation: str, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    adapter.use_experts_function(module, implementation)
    y: Tensor = module(x, ids, weights)
    return y


def _experts_class(model_type: str) -> Any:
    """The class that transformers' decorator for experts made; None where there is none."""
    folder = Path(transformers.__file__).parent / "models" / model_type
    if not (folder / f"modeling_{model_type}.py").is_file():
        return None
    module = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    found = [
        member
        for name, member in inspect.getmembers(module, inspect.isclass)
        if name.endswith("Experts")
        and member.__module__ == module.__name__
        and hasattr(member, "_apply_gate")
    ]
    return found[0] if found else None


def _config(model_type: str) -> Any:
    config = transformers.AutoConfig.for_model(model_type).get_text_config()
    for name, size in _SIZES.items():
        if hasattr(config, name):
            setattr(config, name, size)
    return config
