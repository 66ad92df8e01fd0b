"""gate_up: the first two projections of the routed experts, and SwiGLU between them."""

import torch
import triton
from torch import Tensor

from exactmoe.formats.rows import Rows
from exactmoe.kernels.triton import gate_up as kernels
from exactmoe.ops.triton.prepare import TritonWeight
from exactmoe.ops.triton.tile import Tile, token_tiles
from exactmoe.runtime.routes import RouteTable

TILE = Tile(16, 32, 64, 128, 4, 3)


def gate_up(
    rows: Rows,
    gate_up: tuple[TritonWeight, TritonWeight],
    routes: RouteTable,
    weights: Tensor | None,
    swiglu_limit: float | None,
    h: Tensor,
    tile: Tile = TILE,
) -> None:
    gate, up = gate_up
    num_slots, num_tokens = h.shape[0], rows.values.shape[0]
    if num_slots == 0:
        return
    experts, size, columns = gate.weight.num_experts, gate.weight.rows, gate.weight.columns
    tiles, by_slot = token_tiles(num_slots, tile.tokens, experts)
    scaled = rows.scales is not None
    values = rows.values.view(torch.uint8) if scaled else rows.values
    scales = rows.scales if scaled else gate.factors
    kernels.gate_up[(triton.cdiv(size, tile.rows), tiles)](
        (values, values.stride(0), scales, scales.stride(0)),
        gate.arguments,
        up.arguments,
        (routes.offsets, routes.slots),
        gate.factors if weights is None else weights,
        (h if scaled else h.view(torch.int16), h.stride(0)),
        0.0 if swiglu_limit is None else swiglu_limit,
        experts,
        num_slots // num_tokens,
        size,
        COLUMNS=columns,
        FORMAT=gate.format,
        SCALED=scaled,
        DIVIDE_GATE=gate.divide,
        DIVIDE_UP=up.divide,
        CLAMP=swiglu_limit is not None,
        BY_SLOT=by_slot,
        BLOCK_E=triton.next_power_of_2(experts),
        ROWS=tile.rows,
        BLOCK_M=tile.matrix_rows,
        BLOCK_N=tile.tokens,
        BLOCK_K=tile.columns,
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=False,
    )
