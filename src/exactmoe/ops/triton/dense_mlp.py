"""dense_mlp: dense FFN and shared expert."""

from typing import Any

import torch
import triton
from torch import Tensor

from exactmoe.kernels.triton import dense_mlp as kernels
from exactmoe.ops.triton.launch import Launch, architecture, require_one_format
from exactmoe.ops.triton.prepare import TritonWeight
from exactmoe.plan.tiles import Tile, dense_tile, tile

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
    second = {
        "h": (h, h.stride(0)),
        "weight": down.arguments,
        "out": (out, out.stride(0)),
        "num_tokens": x.shape[0],
        "rows": down.weight.rows,
    }
    first = gate_up_launch(x, (gate, up), swiglu_limit, h, tile, architecture)
    last, cut = {"DIVIDE": down.divide}, fitted(tile, down, 1, x.shape[0])
    return first, dense_launch(kernels.dense_down, down, second, last, cut, architecture)


def dense_gate_up(
    x: Tensor,
    gate_up: tuple[TritonWeight, TritonWeight],
    swiglu_limit: float | None,
    h: Tensor,
    backend: str,
) -> None:
    """The first half: x bfloat16 [T, H] -> h bfloat16 [T, I]; backend as in dense_mlp."""
    name = architecture(x.device)
    chosen = tile(backend, name, "dense_mlp", x.shape[0], 1)
    gate_up_launch(x, gate_up, swiglu_limit, h, chosen, name).run()


def gate_up_launch(
    x: Tensor,
    gate_up: tuple[TritonWeight, TritonWeight],
    swiglu_limit: float | None,
    h: Tensor,
    tile: Tile,
    architecture: str,
) -> Launch:
    """gate_up with a given tile.

    Raises:
        Unsupported: gate and up have different formats.
    """
    gate, up = gate_up
    require_one_format(gate, up)
    arguments = {
        "x": (x, x.stride(0)),
        "gate": gate.arguments,
        "up": up.arguments,
        "h": (h.view(torch.int16), h.stride(0)),
        "limit": 0.0 if swiglu_limit is None else float(swiglu_limit),
        "num_tokens": x.shape[0],
        "rows": gate.weight.rows,
    }
    constants = {
        "DIVIDE_GATE": gate.divide,
        "DIVIDE_UP": up.divide,
        "CLAMP": swiglu_limit is not None,
    }
    pair = fitted(tile, gate, 2, x.shape[0])
    return dense_launch(kernels.dense_gate_up, gate, arguments, constants, pair, architecture)


def fitted(tile: Tile, weight: TritonWeight, projections: int, num_tokens: int) -> Tile:
    """The tile for gate and up, which are one operand, or for down alone."""
    shape = (weight.weight.num_experts, weight.weight.rows)
    return dense_tile(tile, projections, weight.format == "fp8", shape, num_tokens)


def dense_launch(
    kernel: object,
    weight: TritonWeight,
    arguments: dict[str, Any],
    constants: dict[str, Any],
    tile: Tile,
    architecture: str,
) -> Launch:
    """A kernel of dense parts over (row blocks x token tiles, groups)."""
    columns = weight.weight.columns
    constants = constants | {
        "COLUMNS": columns,
        "SEGMENT": min(columns, DENSE_SEGMENT),
        "FORMAT": weight.format,
        "GROUP": _GROUP,
    }
    blocks = triton.cdiv(arguments["rows"], tile.rows)
    tiles = blocks * triton.cdiv(arguments["num_tokens"], tile.tokens)
    experts = weight.weight.num_experts
    grid = (tiles,) if experts == 1 else (tiles, experts)
    return Launch(kernel, grid, arguments, constants, tile, architecture)
