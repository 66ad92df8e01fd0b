"""The order of a dot on the CPU (contract section 4): 16 lanes, then a fixed tree."""

import torch
from torch import Tensor

from exactmoe.formats import BLOCK
from exactmoe.reference.functions import fma32

LANES = 16
SCALE_GROUP = 128
DENSE_SEGMENT = 4096
ROUTER_SEGMENTS = 16


def dot(w: Tensor, x: Tensor) -> Tensor:
    """One chain: w float32 [N, K], x float32 [T, K] -> float32 [T, N]; K a multiple of 16.

    Lane j adds the products of k = j, j + 16, ... ascending, from +0, two roundings a step. Then
    lanes j + (j + 8), +4,
    +2, +1.
    """
    lanes = w.new_zeros(x.shape[0], w.shape[0], LANES)
    for k in range(0, w.shape[1], LANES):
        lanes = lanes + w[None, :, k : k + LANES] * x[:, None, k : k + LANES]
    half = LANES // 2
    while half:
        lanes = lanes[..., :half] + lanes[..., half : 2 * half]
        half //= 2
    return lanes[..., 0]


def dot_scaled(w: Tensor, x: Tensor, scales: Tensor) -> Tensor:
    """Class `a8`: one chain per 128 of k, acc = fma(chain, x scale, acc), k ascending.

    w float32 [N, K], x float32 [T, K] (values of e4m3 codes), scales float32 [T, K // 128] ->
    float32 [T, N].
    """
    total = w.new_zeros(x.shape[0], w.shape[0])
    for group in range(scales.shape[1]):
        columns = slice(group * SCALE_GROUP, (group + 1) * SCALE_GROUP)
        chain = dot(w[:, columns], x[:, columns])
        total = fma32(chain, scales[:, group : group + 1].expand_as(chain), total)
    return total


def dot_blocks(w: Tensor, x: Tensor, scales: Tensor, segment: int) -> Tensor:
    """FP8 128 x 128 blocks: one chain per 128 of k, acc = fma(chain, block scale, acc), k
    ascending; anew from +0 every `segment` of k, and the segments are added ascending, from +0.

    w float32 [N, K] (values of e4m3 codes), x float32 [T, K], scales float32 [ceil(N / 128), ceil(K
    / 128)] -> float32 [T, N]. Routed experts have one segment, K.
    """
    row_scales = scales.repeat_interleave(BLOCK["fp8"], 0)[: w.shape[0]]
    total = w.new_zeros(x.shape[0], w.shape[0])
    for start in range(0, w.shape[1], segment):
        accumulator = torch.zeros_like(total)
        end = min(start + segment, w.shape[1])
        for first in range(start, end, BLOCK["fp8"]):
            columns = slice(first, min(first + BLOCK["fp8"], end))
            chain = dot(w[:, columns], x[:, columns])
            scale = row_scales[:, first // BLOCK["fp8"]].expand_as(chain)
            accumulator = fma32(chain, scale, accumulator)
        total = total + accumulator
    return total


def dot_dense(w: Tensor, x: Tensor) -> Tensor:
    """Dense parts: segments of 4096 of k, each one chain from +0, added ascending. Up to 4096 it is
    `dot`.
    """
    total = w.new_zeros(x.shape[0], w.shape[0])
    for start in range(0, w.shape[1], DENSE_SEGMENT):
        columns = slice(start, start + DENSE_SEGMENT)
        total = total + dot(w[:, columns], x[:, columns])
    return total


def dot_router(w: Tensor, x: Tensor) -> Tensor:
    """Router logits: k in 16 equal segments (rounded up to multiples of 16), added as a binary tree
    over them.
    """
    per_segment = -(-w.shape[1] // (ROUTER_SEGMENTS * LANES)) * LANES
    sums = []
    for segment in range(ROUTER_SEGMENTS):
        columns = slice(segment * per_segment, (segment + 1) * per_segment)
        sums.append(dot(w[:, columns], x[:, columns]))
    while len(sums) > 1:
        sums = [left + right for left, right in zip(sums[0::2], sums[1::2], strict=True)]
    return sums[0]
