"""FP8 with one scale per 128 x 128 block: E4M3 codes, value = e4m3 x scale.

GLM stores float32 scales in `weight_scale_inv` (multiplied, in spite of the name), DeepSeek-V4
stores E8M0 in `scale`, compressed-tensors the model's dtype in `weight_scale`. Blocks at the edges
may be smaller.
"""

import torch

from exactmoe.checkpoint.dialects.dialect import Dialect, Part

FP8_BLOCK = 128
_CODES = Part("codes", ".weight", ("F8_E4M3",), 1, torch.uint8)


def _dialect(suffix: str, *dtypes: str) -> Dialect:
    scales = Part("scales", suffix, dtypes, FP8_BLOCK, torch.float32, rows_per=FP8_BLOCK)
    return Dialect(f"FP8 128x128 with {suffix[1:]}", "fp8", (_CODES, scales))


FP8_DIALECTS = (
    _dialect(".weight_scale_inv", "F32"),
    _dialect(".scale", "F8_E8M0"),
    _dialect(".weight_scale", "BF16", "F32"),
)
