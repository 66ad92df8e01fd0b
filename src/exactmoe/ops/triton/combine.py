"""combine: a token's slots, and its shared expert, to one row of y."""

import triton
from torch import Tensor

from exactmoe.config import Numerics
from exactmoe.kernels.triton.combine import combine as kernel
from exactmoe.ops.triton.early import early

_LANE_BYTES = 16  # that a lane reads of a slot


def combine(
    slots: Tensor,
    routed: tuple[Tensor, Tensor],
    num_experts: int,
    numerics: Numerics,
    shared: Tensor | None,
    y: Tensor,
) -> None:
    """slots bfloat16 or float32 [S, H], routed (expert_ids, weights) [T, K], shared float32 [T, H]
    or None -> y bfloat16 or float32 [T, H].
    """
    expert_ids, weights = routed
    num_tokens, hidden = y.shape
    if num_tokens == 0:
        return
    top_k = expert_ids.shape[1]
    block = 32 * _LANE_BYTES // slots.element_size()
    grid = (num_tokens, triton.cdiv(hidden, block))
    kernel[grid](
        slots,
        expert_ids,
        weights,
        weights if shared is None else shared,
        y,
        num_experts,
        hidden,
        TOP_K=top_k,
        WEIGHTED=numerics.activation == "a16",
        SHARED=shared is not None,
        BLOCK_K=triton.next_power_of_2(top_k),
        BLOCK_H=block,
        num_warps=1,
        enable_fp_fusion=False,
        **early(y.device, joins=shared is not None, programs=grid[0] * grid[1]),
    )
