"""gate_up: the first two projections of the routed experts, and SwiGLU between them."""

from dataclasses import replace

import torch
import triton
from torch import Tensor

from exactmoe.formats.rows import Rows
from exactmoe.kernels.triton import gate_up as kernels
from exactmoe.ops.triton.launch import (
    Launch,
    architecture,
    chained,
    expert_grid,
    require_one_format,
    row_arguments,
)
from exactmoe.ops.triton.prepare import TritonWeight
from exactmoe.plan.tiles import Tile, tile
from exactmoe.runtime.routes import RouteTable


def gate_up(
    rows: Rows,
    gate_up: tuple[TritonWeight, TritonWeight],
    routes: RouteTable,
    weights: Tensor | None,
    swiglu_limit: float | None,
    h: Tensor,
) -> None:
    """rows [T, H] -> h [S, I] in place: `a16` bfloat16; `a8` float32, times weights [T, K]."""
    experts = gate_up[0].weight.num_experts
    name = architecture(h.device)
    chosen = tile("triton", name, "gate_up", h.shape[0], experts)
    launch(rows, gate_up, routes, (weights, swiglu_limit), h, chosen, name).run()


def launch(
    rows: Rows,
    gate_up: tuple[TritonWeight, TritonWeight],
    routes: RouteTable,
    activation: tuple[Tensor | None, float | None],
    h: Tensor,
    tile: Tile,
    architecture: str,
) -> Launch:
    """The launch with a given tile; its rows of both projections are one operand.

    activation: (weights, swiglu_limit).

    Raises:
        Unsupported: gate and up have different formats.
    """
    gate, up = gate_up
    require_one_format(gate, up)
    weights, swiglu_limit = activation
    if rows.scales is not None or gate.format == "fp8":
        tile = chained(tile, projections=2)
    tile = replace(tile, matrix_rows=max(tile.matrix_rows, 2 * tile.rows))
    size, columns, experts = gate.weight.rows, gate.weight.columns, gate.weight.num_experts
    tiles, found_by = expert_grid(h.shape[0], experts, tile)
    arguments = {
        "x": row_arguments(rows),
        "gate": gate.arguments,
        "up": up.arguments,
        "routes": (routes.offsets, routes.slots),
        "weights": gate.factors if weights is None else weights,
        "h": (h if rows.scales is not None else h.view(torch.int16), h.stride(0)),
        "limit": 0.0 if swiglu_limit is None else float(swiglu_limit),
        "num_experts": experts,
        "top_k": h.shape[0] // max(rows.values.shape[0], 1),
        "rows": size,
    }
    constants = {
        "COLUMNS": columns,
        "FORMAT": gate.format,
        "SCALED": rows.scales is not None,
        "DIVIDE_GATE": gate.divide,
        "DIVIDE_UP": up.divide,
        "CLAMP": swiglu_limit is not None,
    }
    grid = (tiles * triton.cdiv(size, tile.rows),)
    return Launch(kernels.gate_up, grid, arguments, constants | found_by, tile, architecture)
