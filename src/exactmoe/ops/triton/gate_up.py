"""gate_up: the first two projections of the routed experts, and SwiGLU between them."""

from dataclasses import replace

import torch
import triton
from torch import Tensor

from exactmoe import env
from exactmoe.formats.rows import Rows
from exactmoe.kernels.triton import gate_up as kernels
from exactmoe.kernels.triton.gate_then_up import gate_then_up
from exactmoe.ops.triton.launch import (
    Launch,
    architecture,
    expert_grid,
    require_one_format,
    row_arguments,
)
from exactmoe.ops.triton.prepare import TritonWeight
from exactmoe.plan.tiles import Tile, expert_tile, tile
from exactmoe.runtime.routes import RouteTable


def gate_up(
    rows: Rows,
    gate_up: tuple[TritonWeight, TritonWeight],
    routes: RouteTable,
    weights: Tensor | None,
    swiglu_limit: float | None,
    h: Tensor,
) -> None:
    """rows [T, H] -> h [S, I] in place: `a16` bfloat16; `a8` float32, times weights [T, K].

    EXACTMOE_GATE_UP says in how many launches. Two need float32 between them: in `a8` that is h
    itself; in `a16` it is allocated.
    """
    experts = gate_up[0].weight.num_experts
    name = architecture(h.device)
    chosen = tile("triton", name, "gate_up", h.shape[0], experts)
    activation = (weights, swiglu_limit)
    if env.read("EXACTMOE_GATE_UP") == "one":
        launch(rows, gate_up, routes, activation, h, chosen, name).run()
        return
    sums = h if h.dtype == torch.float32 else torch.empty_like(h, dtype=torch.float32)
    for part in launches(rows, gate_up, routes, activation, (sums, h), chosen, name):
        part.run()


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
    tile = expert_tile(tile, 2, chained=rows.scales is not None or gate.format == "fp8")
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


def launches(
    rows: Rows,
    gate_up: tuple[TritonWeight, TritonWeight],
    routes: RouteTable,
    activation: tuple[Tensor | None, float | None],
    outputs: tuple[Tensor, Tensor],
    tile: Tile,
    architecture: str,
) -> tuple[Launch, Launch]:
    """The same in two launches with a given tile, whose rows of two projections become one's.

    activation: (weights, swiglu_limit). outputs: (sums, h), sums float32 [S, I] between the two;
    in `a8` it may be h.

    Raises:
        Unsupported: gate and up have different formats.
    """
    require_one_format(*gate_up)
    (weights, swiglu_limit), (sums, h) = activation, outputs
    chained = rows.scales is not None or gate_up[0].format == "fp8"
    tile = expert_tile(replace(tile, rows=2 * tile.rows), 1, chained)
    size, experts = gate_up[0].weight.rows, gate_up[0].weight.num_experts
    tiles, found_by = expert_grid(h.shape[0], experts, tile)
    grid = (tiles * triton.cdiv(size, tile.rows),)

    def part(weight: TritonWeight, last: bool) -> Launch:
        arguments = {
            "x": row_arguments(rows),
            "weight": weight.arguments,
            "routes": (routes.offsets, routes.slots),
            "weights": weight.factors if weights is None else weights,
            "sums": (sums, sums.stride(0)),
            "h": (h if rows.scales is not None else h.view(torch.int16), h.stride(0)),
            "limit": 0.0 if swiglu_limit is None else float(swiglu_limit),
            "num_experts": experts,
            "top_k": h.shape[0] // max(rows.values.shape[0], 1),
            "rows": size,
        }
        constants = {
            "COLUMNS": weight.weight.columns,
            "FORMAT": weight.format,
            "SCALED": rows.scales is not None,
            "DIVIDE": weight.divide,
            "CLAMP": swiglu_limit is not None,
            "LAST": last,
        }
        return Launch(gate_then_up, grid, arguments, constants | found_by, tile, architecture)

    gate, up = gate_up
    return part(gate, last=False), part(up, last=True)
