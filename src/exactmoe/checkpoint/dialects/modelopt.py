"""NVFP4 as NVIDIA Model Optimizer exports it.

value = e2m1 x `weight_scale` x `weight_scale_2`; the last is a multiplier, amax / 2688. The low
nibble is the even column. An `input_scale` belongs to static activations (see the ignore rules).
NVIDIA's DeepSeek-V4 checkpoints hold their routed experts so, under DeepSeek's names.
"""

import torch

from exactmoe.checkpoint.dialects.dialect import Dialect, Part

MODELOPT_NVFP4 = Dialect(
    name="ModelOpt NVFP4",
    format="nvfp4",
    parts=(
        Part("codes", ".weight", ("U8",), 2, torch.uint8),
        Part("scales", ".weight_scale", ("F8_E4M3",), 16, torch.uint8),
        Part("global_scale", ".weight_scale_2", ("F32",), None, torch.float32),
    ),
)
