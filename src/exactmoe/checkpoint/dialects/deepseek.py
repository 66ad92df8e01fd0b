"""MXFP4 as DeepSeek-V4 is published: int8 bytes of two codes, and E8M0 scales.

value = e2m1 x 2^(byte - 127), no global scale. The low nibble is the even column.
"""

import torch

from exactmoe.checkpoint.dialects.dialect import E8M0_DTYPES, Dialect, Part

DEEPSEEK_MXFP4 = Dialect(
    name="DeepSeek MXFP4",
    format="mxfp4",
    parts=(
        Part("codes", ".weight", ("I8",), 2, torch.uint8),
        Part("scales", ".scale", E8M0_DTYPES, 32, torch.uint8),
    ),
)
