"""NVFP4 as compressed-tensors writes it (format `nvfp4-pack-quantized`).

value = e2m1 x `weight_scale` / `weight_global_scale`; the last is a divisor, 2688 / amax, and it is
kept and divided by: its reciprocal would be rounded once more. The low nibble is the even column.
An `input_global_scale` belongs to static activations (see the ignore rules).
"""

import torch

from exactmoe.checkpoint.dialects.dialect import Dialect, Part

COMPRESSED_TENSORS_NVFP4 = Dialect(
    name="compressed-tensors NVFP4",
    format="nvfp4",
    parts=(
        Part("codes", ".weight_packed", ("U8",), 2, torch.uint8),
        Part("scales", ".weight_scale", ("F8_E4M3",), 16, torch.uint8),
        Part("global_scale", ".weight_global_scale", ("F32",), None, torch.float32),
    ),
    global_scale_op="divide",
)
