"""router: logits, then expert ids and weights of each token."""

from typing import Any

import torch
import triton
from torch import Tensor

from exactmoe.config import Numerics
from exactmoe.kernels.triton import router as kernels
from exactmoe.kernels.triton.select import select as select_kernel
from exactmoe.ops.path import RouterWeights
from exactmoe.ops.triton.early import early

_SEGMENTS, _LANES = kernels.SEGMENTS.value, kernels.LANES.value
_BLOCK_K = 128


def router(
    x: Tensor,
    weights: RouterWeights,
    token_ids: Tensor | None,
    numerics: Numerics,
    logits: Tensor,
    routed: tuple[Tensor, Tensor],
    parts: Tensor | None,
) -> None:
    """x bfloat16 [T, H] -> logits float32 [T, E], and routed: expert_ids int32 [T, K] and weights
    float32 [T, K].

    A hash layer's ids come from weights.table [V, K] by token_ids int64 [T]. parts: scratch float32
    [16, T, E] of a narrow call, or None.
    """
    if x.shape[0] == 0:
        return
    units = weights.weight_bf16
    router_logits(x, weights.weight_f32 if units is None else units, logits, parts)
    select(logits, weights, token_ids, numerics, routed, parts)


def router_logits(x: Tensor, weight: Tensor, logits: Tensor, parts: Tensor | None) -> None:
    """x bfloat16 [T, H], weight bfloat16 [E, H] (matrix units) or float32 (the CPU's 16 lanes).

    parts None: logits float32 [T, E] are written. Else only the sums of the 16 segments, to parts
    float32 [16, T, E]; `select` adds them, with the same bits.
    """
    num_tokens, hidden = x.shape
    num_experts = weight.shape[0]
    units = weight.dtype == x.dtype
    per_segment = triton.cdiv(hidden, _SEGMENTS * _LANES) * _LANES
    block_m, block_n, warps = _tile(num_tokens, units, parts is not None)
    grid = (triton.cdiv(num_experts, block_m), triton.cdiv(num_tokens, block_n))
    sizes = (num_tokens, num_experts, hidden, per_segment)
    block_k = min(triton.next_power_of_2(per_segment), _BLOCK_K) if units else _LANES
    options: dict[str, Any] = {
        "UNITS": units,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "STEPS": triton.cdiv(per_segment, block_k),
        "num_warps": warps,
        "num_stages": 3,
        "enable_fp_fusion": False,
        **early(x.device, units=units),
    }
    if torch.version.hip is not None:
        options["matrix_instr_nonkdim"] = 16  # 32 x 32 instructions have other bits
    if parts is None:
        kernels.logits[grid](x, weight, logits, *sizes, **options)
    else:
        kernels.segments[(*grid, _SEGMENTS)](x, weight, parts, parts.stride(0), *sizes, **options)


def _tile(num_tokens: int, units: bool, narrow: bool) -> tuple[int, int, int]:
    """(experts, tokens, warps) of a program. It cannot change a bit. The tree of a wide call keeps
    five tiles of sums in registers: 8 warps of 64 x 64 hold them without spills.
    """
    if not units:
        return 16, 8, 4
    if not narrow:
        return 64, 64, 8
    return 64, min(max(triton.next_power_of_2(num_tokens), 16), 64), 4


def select(
    logits: Tensor,
    weights: RouterWeights,
    token_ids: Tensor | None,
    numerics: Numerics,
    routed: tuple[Tensor, Tensor],
    parts: Tensor | None = None,
) -> None:
    """logits float32 [T, E] -> routed: expert_ids int32 [T, K] and weights float32 [T, K].

    parts: the segments' sums float32 [16, T, E]; their tree is then written to logits first.
    """
    num_tokens, num_experts = logits.shape
    if num_tokens == 0:
        return
    expert_ids, chosen = routed
    hashed = weights.table is not None and token_ids is not None
    select_kernel[(num_tokens,)](
        logits,
        logits if parts is None else parts,
        0 if parts is None else parts.stride(0),
        logits if weights.bias is None else weights.bias,
        weights.table if hashed else expert_ids,
        token_ids if hashed else expert_ids,
        expert_ids,
        chosen,
        num_experts,
        weights.table.shape[0] if hashed else 0,
        weights.config.factor,
        PARTS=parts is not None,
        BIASED=weights.bias is not None,
        HASHED=hashed,
        SIGMOID=weights.config.score == "sigmoid",
        NORMALIZE=weights.config.normalize,
        LADDER=numerics.router == "bf16_ladder",
        TOP_K=expert_ids.shape[1],
        BLOCK_E=triton.next_power_of_2(num_experts),
        BLOCK_K=triton.next_power_of_2(expert_ids.shape[1]),
        num_warps=_warps(num_experts, parts is not None),
        enable_fp_fusion=False,
        **early(logits.device, programs=num_tokens),
    )


def _warps(num_experts: int, narrow: bool) -> int:
    """A narrow call gives each thread one expert: then all loads of its 16 sums are in flight."""
    return min(max(triton.next_power_of_2(num_experts) // 32, 1), 32 if narrow else 4)
