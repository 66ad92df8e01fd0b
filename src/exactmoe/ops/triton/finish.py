"""finish: a dense MLP's float32 rows to y."""

import triton
from torch import Tensor

from exactmoe.kernels.triton.finish import finish as kernel
from exactmoe.ops.triton.early import early

_BLOCK = 1024


def finish(dense: Tensor, y: Tensor) -> None:
    """y = round(+0 + dense): float32 [T, H] to bfloat16 or float32, canonical NaN."""
    count = y.numel()
    if count:
        programs = triton.cdiv(count, _BLOCK)
        kernel[(programs,)](
            dense,
            y,
            count,
            BLOCK=_BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
            **early(y.device, programs=programs),
        )
