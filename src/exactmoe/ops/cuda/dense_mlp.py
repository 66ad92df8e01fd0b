"""dense_mlp of bf16 weights on sm_90: which kernel, how many blocks, which arguments."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from exactmoe.errors import Unsupported
from exactmoe.kernels.cuda.compile import kernel
from exactmoe.kernels.cuda.dense import SEGMENT, Dense
from exactmoe.kernels.cuda.tensor_map import TensorMap, rows_map
from exactmoe.ops.cuda.launch import queue
from exactmoe.ops.triton.prepare import TritonWeight
from exactmoe.plan.choose import dense_obstacle
from exactmoe.plan.dense_tiles import DenseProblem, DenseTile, best_span, dense_tile

_NO_CLAMP = float("inf")
# What tensor copies ask of addresses and row strides.
_ALIGNMENT = 16
# Eights of gate and of up rows are copied in turn.
_EIGHT = 8


@dataclass(frozen=True)
class DenseLaunch:
    """One launch.

    Attributes:
        variant: the kernel.
        weights: bfloat16 [N, K] of gate and up, or of down twice.
        tokens: bfloat16 [T, K].
        out: bfloat16 [T, N] of gate_up, float32 [T, N] of down.
        limit: the clamp of gate_up.
        span: tokens of a block, at most the kernel's.
    """

    variant: Dense
    weights: tuple[Tensor, Tensor]
    tokens: Tensor
    out: Tensor
    limit: float
    span: int

    def run(self, early: bool) -> None:
        """Queues it on the current stream.

        Args:
            early: it may start while the kernel before it ends. gate_up waits for that at once;
                down reads weights before it waits, so these must be older.
        """
        variant, device = self.variant, self.out.device.index
        num_tokens, columns = self.tokens.shape
        rows = self.weights[0].shape[0]
        arguments: list[Any] = [
            *(_weight_map(weight, variant) for weight in self.weights),
            _token_map(self.tokens, variant),
            ctypes.c_void_p(self.out.data_ptr()),
            ctypes.c_uint64(_stride(self.out)),
            *(ctypes.c_uint32(number) for number in (num_tokens, self.span, rows, columns)),
            ctypes.c_float(self.limit),
        ]
        grid = (self._clusters(device) * variant.cluster, 1, variant.threads)
        queue(kernel(variant), self.out, grid, arguments, early)

    def _clusters(self, device: int) -> int:
        """Of the grid: as few as take their items in as few rounds as all together; all where a
        last token tile, with less work, comes after the others.
        """
        variant, most = self.variant, _most_clusters(self.variant, device)
        row_blocks = -(-self.weights[0].shape[0] // variant.features)
        clusters = -(-row_blocks // variant.cluster)
        token_tiles, tail = divmod(self.tokens.shape[0], self.span)
        if token_tiles > 0 and 0 < 2 * tail <= self.span:
            return min(clusters * (token_tiles + 1), most)
        items = clusters * (token_tiles + (tail > 0))
        return -(-items // -(-items // most))


def takes(weights: Sequence[TritonWeight]) -> bool:
    """Whether these kernels run gate, up and down, or gate and up: what a plan finds and `explain`
    says (plan.mlp_tiles_of). Rows have no say in it.
    """
    return dense_obstacle([weight.shape for weight in weights]) is None


def dense_mlp(
    x: Tensor,
    weights: tuple[TritonWeight, TritonWeight, TritonWeight],
    swiglu_limit: float | None,
    h: Tensor,
    out: Tensor,
) -> None:
    """x bfloat16 [T, H] -> out float32 [T, H] before its rounding; h bfloat16 [T, I] is scratch.

    Raises:
        Unsupported: rows that tensor copies cannot reach; a workspace has none.
    """
    if x.shape[0] == 0:
        return
    _require_reachable("out", out)
    dense_gate_up(x, weights[:2], swiglu_limit, h)
    down = weights[2].weight.codes[0]
    # Behind its gate_up, which started when everything older had ended.
    _launch("down", (down, down), h, out, 0.0).run(early=True)


def dense_gate_up(
    x: Tensor,
    gate_up: tuple[TritonWeight, TritonWeight],
    swiglu_limit: float | None,
    h: Tensor,
) -> None:
    """The first half: x bfloat16 [T, H] -> h bfloat16 [T, I]."""
    if x.shape[0] == 0:
        return
    _require_reachable("x", x)
    _require_reachable("h", h)
    gate, up = (weight.weight.codes[0] for weight in gate_up)
    limit = _NO_CLAMP if swiglu_limit is None else float(swiglu_limit)
    _launch("gate_up", (gate, up), x, h, limit).run(early=True)


def _launch(
    op: str, weights: tuple[Tensor, Tensor], tokens: Tensor, out: Tensor, limit: float
) -> DenseLaunch:
    """With the tile of the table."""
    rows, columns = weights[0].shape
    problem = DenseProblem(op, rows, columns, tokens.shape[0])
    chosen = dense_tile(problem)
    variant = variant_of(op, columns, chosen)
    return DenseLaunch(variant, weights, tokens, out, limit, best_span(problem, chosen))


def variant_of(op: str, columns: int, tile: DenseTile) -> Dense:
    """The kernel of a tile for k = `columns`."""
    segmented = columns > SEGMENT
    return Dense(op, tile.rows, tile.tokens, tile.chunks, tile.cluster, tile.blocks, segmented)


def _weight_map(weight: Tensor, variant: Dense) -> TensorMap:
    box_rows = _EIGHT if variant.op == "gate_up" else variant.rows
    shape = (weight.shape[0], weight.shape[1])
    return rows_map(weight.data_ptr(), shape, weight.stride(0), box_rows, variant.chunks)


def _token_map(tokens: Tensor, variant: Dense) -> TensorMap:
    """Of all tokens and chunks of a stage, or of a piece that is sent to a cluster."""
    box_chunks = variant.chunks if variant.cluster == 1 else 1
    shape = (tokens.shape[0], tokens.shape[1])
    return rows_map(tokens.data_ptr(), shape, _stride(tokens), variant.piece, box_chunks)


def _stride(rows: Tensor) -> int:
    """Elements from row to row. A single row may have any stride, which says nothing."""
    return rows.stride(0) if rows.shape[0] > 1 else rows.shape[1]


def _require_reachable(name: str, rows: Tensor) -> None:
    """Unsupported unless each row lies in one piece and begins at a multiple of 16 bytes."""
    if rows.stride(1) != 1:
        raise Unsupported(f"{name} has strides {rows.stride()}; allowed: the last stride 1")
    if past := rows.data_ptr() % _ALIGNMENT:
        raise Unsupported(
            f"{name} begins {past} bytes behind a multiple of {_ALIGNMENT}; allowed: 0 bytes"
        )
    apart = _stride(rows) * rows.element_size()
    if apart % _ALIGNMENT:
        raise Unsupported(
            f"the rows of {name} are {apart} bytes apart; allowed: multiples of {_ALIGNMENT}"
        )


@cache
def _most_clusters(variant: Dense, device: int) -> int:
    """One block a multiprocessor, and of clusters as many as its groups of multiprocessors hold."""
    most = _processors(device) // variant.cluster
    if variant.cluster == 1:
        return most
    return min(most, kernel(variant).most_clusters(device, variant.cluster, variant.threads))


@cache
def _processors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
