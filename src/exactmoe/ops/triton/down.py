"""down: the last projection of the routed experts."""

import torch
import triton
from torch import Tensor

from exactmoe.config import Numerics
from exactmoe.formats.rows import Rows
from exactmoe.kernels.triton import down as kernels
from exactmoe.ops.triton.launch import Launch, architecture, expert_grid, row_arguments
from exactmoe.ops.triton.prepare import TritonWeight
from exactmoe.plan.tiles import Tile, expert_tile, tile
from exactmoe.runtime.routes import RouteTable


def down(
    h: Rows, down: TritonWeight, routes: RouteTable, numerics: Numerics, slots: Tensor
) -> None:
    """h [S, I] -> slots [S, H] at their places, bfloat16 where numerics.slot says, else float32."""
    experts = down.weight.num_experts
    name = architecture(slots.device)
    chosen = tile("triton", name, "down", slots.shape[0], experts)
    launch(h, down, routes, numerics.slot == "bf16", slots, chosen, name).run()


def launch(
    h: Rows,
    down: TritonWeight,
    routes: RouteTable,
    rounded: bool,
    slots: Tensor,
    tile: Tile,
    architecture: str,
) -> Launch:
    """The launch with a given tile. rounded: to bfloat16."""
    tile = expert_tile(tile, 1, chained=h.scales is not None or down.format == "fp8")
    size, columns, experts = down.weight.rows, down.weight.columns, down.weight.num_experts
    tiles, found_by = expert_grid(slots.shape[0], experts, tile)
    arguments = {
        "h": row_arguments(h),
        "weight": down.arguments,
        "routes": (routes.offsets, routes.slots),
        "out": (slots.view(torch.int16) if rounded else slots, slots.stride(0)),
        "num_experts": experts,
        "rows": size,
    }
    constants = {
        "COLUMNS": columns,
        "FORMAT": down.format,
        "SCALED": h.scales is not None,
        "DIVIDE": down.divide,
        "ROUND": rounded,
    }
    grid = (tiles * triton.cdiv(size, tile.rows),)
    return Launch(kernels.down, grid, arguments, constants | found_by, tile, architecture)
