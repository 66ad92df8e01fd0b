"""BF16: the weight itself."""

import torch

from exactmoe.checkpoint.dialects.dialect import Dialect, Part

PLAIN_BF16 = Dialect(
    name="BF16",
    format="bf16",
    parts=(Part("codes", ".weight", ("BF16",), 1, torch.bfloat16),),
)
