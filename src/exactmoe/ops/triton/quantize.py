"""quantize: activations of class `a8`."""

import torch
import triton
from torch import Tensor

from exactmoe.formats.rows import Rows
from exactmoe.kernels.triton import quantize as kernels
from exactmoe.ops.triton.early import early

_BLOCK = 8  # groups of a program: 8 values a thread


def quantize(values: Tensor, out: Rows) -> Rows:
    """Float32 or bfloat16 [T, K], K a multiple of 128 -> out: codes float8_e4m3fn [T, K] and scales
    float32 [T, K // 128].
    """
    assert out.scales is not None
    num_groups = out.scales.numel()
    if num_groups:
        programs = triton.cdiv(num_groups, _BLOCK)
        kernels.quantize[(programs,)](
            values,
            out.values.view(torch.uint8),
            out.scales,
            num_groups,
            BLOCK=_BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
            **early(values.device, programs=programs),
        )
    return out
