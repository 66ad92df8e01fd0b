"""dense_mlp: dense FFN and shared expert."""

from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from exactmoe.kernels.triton import dense_mlp as kernels
from exactmoe.ops.triton.launch import Launch, architecture, chained, require_one_format
from exactmoe.ops.triton.prepare import TritonWeight
from exactmoe.plan.tiles import Tile, tile

DENSE_SEGMENT = 4096
# Token tiles that go over all weight rows together: 8 of 128 tokens by 4096 of k are 8 MB of L2.
_GROUP = 8


def dense_mlp(
    x: Tensor,
    weights: tuple[TritonWeight, TritonWeight, TritonWeight],
    swiglu_limit: float | None,
    h: Tensor,
    out: Tensor,
    backend: str,
) -> None:
    """x bfloat16 [T, H] -> out float32 [T, H] before its rounding; h bfloat16 [T, I] is scratch.

    backend: whose tiles it takes; the paths of a card share these kernels, and EXACTMOE_TILE is
        checked against what the layer's own path offers.
    """
    name = architecture(x.device)
    chosen = tile(backend, name, "dense_mlp", x.shape[0], 1)
    for launch in launches(x, weights, swiglu_limit, h, out, chosen, name):
        launch.run()


def launches(
    x: Tensor,
    weights: tuple[TritonWeight, TritonWeight, TritonWeight],
    swiglu_limit: float | None,
    h: Tensor,
    out: Tensor,
    tile: Tile,
    architecture: str,
) -> tuple[Launch, Launch]:
    """gate_up and down with a given tile.

    Raises:
        Unsupported: gate and up have different formats.
    """
    gate, up, down = weights
    require_one_format(gate, up)
    first = {
        "x": (x, x.stride(0)),
        "gate": gate.arguments,
        "up": up.arguments,
        "h": (h.view(torch.int16), h.stride(0)),
        "limit": 0.0 if swiglu_limit is None else swiglu_limit,
        "num_tokens": x.shape[0],
        "rows": gate.weight.rows,
    }
    constants = {
        "DIVIDE_GATE": gate.divide,
        "DIVIDE_UP": up.divide,
        "CLAMP": swiglu_limit is not None,
    }
    second = {
        "h": (h, h.stride(0)),
        "weight": down.arguments,
        "out": (out, out.stride(0)),
        "num_tokens": x.shape[0],
        "rows": down.weight.rows,
    }
    return (
        _launch(
            kernels.dense_gate_up, gate, first, constants, _pair_tile(tile, gate), architecture
        ),
        _launch(
            kernels.dense_down,
            down,
            second,
            {"DIVIDE": down.divide},
            _tile(tile, down),
            architecture,
        ),
    )


def _pair_tile(tile: Tile, weight: TritonWeight) -> Tile:
    """For gate and up together: their rows are one operand."""
    if weight.format == "fp8":
        tile = chained(tile, projections=2)
    return replace(tile, matrix_rows=max(tile.matrix_rows, 2 * tile.rows))


def _tile(tile: Tile, weight: TritonWeight) -> Tile:
    """For down: as many rows as of gate and up together, if they fit."""
    tile = replace(tile, rows=min(2 * tile.rows, tile.matrix_rows))
    return chained(tile, projections=1) if weight.format == "fp8" else tile


def _launch(
    kernel: object,
    weight: TritonWeight,
    arguments: dict[str, Any],
    constants: dict[str, Any],
    tile: Tile,
    architecture: str,
) -> Launch:
    columns = weight.weight.columns
    constants = constants | {
        "COLUMNS": columns,
        "SEGMENT": min(columns, DENSE_SEGMENT),
        "FORMAT": weight.format,
        "GROUP": _GROUP,
    }
    blocks = triton.cdiv(arguments["rows"], tile.rows)
    grid = (blocks * triton.cdiv(arguments["num_tokens"], tile.tokens),)
    return Launch(kernel, grid, arguments, constants, tile, architecture)
