"""What compressed-tensors writes: `nvfp4-pack-quantized` and `mxfp4-pack-quantized`.

NVFP4: value = e2m1 x `weight_scale` / `weight_global_scale`; the last is a divisor, 2688 / amax,
and it is kept and divided by: its reciprocal would be rounded once more. MXFP4: value = e2m1 x
2^(byte - 127). The low nibble is the even column. An `input_global_scale` belongs to static
activations (see the ignore rules). Its FP8 blocks are in fp8.py.
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
COMPRESSED_TENSORS_MXFP4 = Dialect(
    name="compressed-tensors MXFP4",
    format="mxfp4",
    parts=(
        Part("codes", ".weight_packed", ("U8",), 2, torch.uint8),
        Part("scales", ".weight_scale", ("U8",), 32, torch.uint8),
    ),
)
