"""All experts of a layer in one tensor, as in the parameters of transformers' experts modules.

`experts.gate_up_proj` [E, 2I, K] has the rows of gate first, then those of up;
`experts.down_proj` [E, N, K]. Block scales lie beside them under `_scale`, global scales under
`_scale_2`: [E, 2] one for gate and one for up, [E, 1] for down, or [E] one for all of an expert.
"""

import torch

from exactmoe.checkpoint.dialects.dialect import E8M0_DTYPES, Dialect, Part, RefusedLayout

STACKED_NVFP4 = Dialect(
    name="stacked NVFP4",
    format="nvfp4",
    parts=(
        Part("codes", "", ("U8",), 2, torch.uint8),
        Part("scales", "_scale", ("F8_E4M3",), 16, torch.uint8),
        Part("global_scale", "_scale_2", ("F32",), None, torch.float32),
    ),
)
STACKED_MXFP4 = Dialect(
    name="stacked MXFP4",
    format="mxfp4",
    parts=(
        Part("codes", "", ("I8",), 2, torch.uint8),
        Part("scales", "_scale", E8M0_DTYPES, 32, torch.uint8),
    ),
)
STACKED_BF16 = Dialect(
    name="stacked BF16",
    format="bf16",
    parts=(Part("codes", "", ("BF16",), 1, torch.bfloat16),),
)

GPT_OSS_MXFP4 = RefusedLayout(
    name="gpt-oss MXFP4",
    suffixes=frozenset({"_blocks", "_scales"}),
    reason="its rows of gate and up are interleaved and it has biases, which nothing here adds",
)
