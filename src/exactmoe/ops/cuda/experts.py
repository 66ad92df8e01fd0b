"""gate_up and down on sm_90: which kernel, how many blocks, which arguments."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from exactmoe.config import Numerics
from exactmoe.errors import Unsupported
from exactmoe.formats.rows import Rows
from exactmoe.kernels.cuda.compile import kernel
from exactmoe.kernels.cuda.source import (
    PANEL,
    THREADS,
    WIDEST_GATHER,
    Pack,
    Variant,
)
from exactmoe.ops.cuda.launch import numbers, pointers, processors, queue
from exactmoe.ops.cuda.prepare import CudaWeight
from exactmoe.plan.tiles import WIDEST_ON_BF16, tile
from exactmoe.runtime.routes import RouteTable

_NO_CLAMP = float("inf")
_ARCHITECTURE = "sm_90"
# Blocks that pack the rows of one expert.
_PACKERS, _PACK_THREADS = 8, 256


@dataclass(frozen=True)
class _Geometry:
    """Numbers of a launch: pairs of panels of an expert, slots a row of x, which of the two
    epilogues divide (bits 0 and 1), the clamp.
    """

    pairs: int
    top_k: int
    divide: int
    limit: float


def gate_up(
    rows: Rows,
    gate_up: tuple[CudaWeight, CudaWeight],
    routes: RouteTable,
    swiglu_limit: float | None,
    h: Tensor,
) -> None:
    """rows bf16 [T, H], with bf16 [packed, H] of scratch -> packed h bf16 [packed, I], class `a16`.

    Packed: kernels/cuda/experts.cu; `Storage.rows_of_h` counts its rows.
    """
    gate, num_slots, x = gate_up[0], routes.slots.shape[0], rows.values
    if num_slots == 0:
        return
    chosen = tile("cuda", _ARCHITECTURE, "gate_up", num_slots, gate.num_experts)
    top_k, gather = num_slots // x.shape[0], chosen.tokens <= WIDEST_GATHER
    if not gather:
        x = _packed(rows, routes, gate, top_k)
    variant = Variant("gate_up", gate.format, chosen.tokens, gather)
    _launch(variant, gate_up, routes, (x, h), _of_gate_up(gate_up, top_k, swiglu_limit), True)


def down(
    h: Rows,
    down: CudaWeight,
    routes: RouteTable,
    numerics: Numerics,
    slots: Tensor,
    early: bool,
) -> None:
    """Packed h bf16 [packed, I] -> slots [S, H] at their places, bf16 or f32 as numerics.slot says.

    Args:
        early: the kernel before is gate_up with these routes, or came after it: it may still run
            when weights are first read.
    """
    if slots.shape[0] == 0:
        return
    chosen = tile("cuda", _ARCHITECTURE, "down", slots.shape[0], down.num_experts)
    wide = numerics.slot == "f32"
    variant = Variant("down", down.format, chosen.tokens, slot_f32=wide)
    _launch(variant, (down, down), routes, (h.values, slots), _of_down(down), early)


def gate_up_a8(
    rows: Rows,
    weights: tuple[CudaWeight, CudaWeight, CudaWeight],
    routes: RouteTable,
    routing: Tensor,
    swiglu_limit: float | None,
    h: Rows,
) -> None:
    """rows e4m3 [T, H] with scales [T, H // 128] -> h, quantised and packed, class `a8`.

    Args:
        rows: `packed` is scratch for packed rows, as h.
        weights: gate, up, and down, whose units decide how it reads h.
        routing: weights float32 [T, K].
        h: e4m3 [packed, I] for experts whose down runs on the fp8 units, their values x 2^8 as bf16
            in `packed` for the others, and scales [packed, I // 128].
    """
    gate, up, down = weights
    num_slots, units = routes.slots.shape[0], _joint(gate, up)
    if num_slots == 0:
        return
    tokens = _tokens_a8("gate_up", num_slots, gate.num_experts, units)
    top_k = num_slots // rows.values.shape[0]
    gather = tokens <= WIDEST_GATHER and units == "fp8"
    x = rows if gather else _packed_a8(rows, routes, (gate, up), top_k)
    geometry = _of_gate_up((gate, up), top_k, swiglu_limit)
    variant = Variant("gate_up", gate.format, tokens, gather, False, "a8", units, down.units)
    wide = (_wide(x), x.scales, gate.on_fp8, up.on_fp8, _wide(h), h.scales, down.on_fp8, routing)
    _launch(variant, (gate, up), routes, (x.values, h.values), geometry, True, wide)


def down_a8(h: Rows, down: CudaWeight, routes: RouteTable, slots: Tensor, early: bool) -> None:
    """h of gate_up_a8 -> slots float32 [S, H] at their places."""
    if slots.shape[0] == 0:
        return
    tokens = _tokens_a8("down", slots.shape[0], down.num_experts, down.units)
    variant = Variant("down", down.format, tokens, False, True, "a8", down.units, down.units)
    wide = (_wide(h), h.scales, down.on_fp8, down.on_fp8, None, None, None, None)
    _launch(variant, (down, down), routes, (h.values, slots), _of_down(down), early, wide)


def _tokens_a8(op: str, num_slots: int, num_experts: int, units: str) -> int:
    """Width of the tile: on the bf16 units the operands of a stage take too many registers for the
    widest.
    """
    tokens = tile("cuda_a8", _ARCHITECTURE, op, num_slots, num_experts).tokens
    return tokens if units == "fp8" else min(tokens, WIDEST_ON_BF16)


def _wide(packed: Rows) -> Tensor | None:
    """The bf16 values of packed rows; of rows that are gathered there are none."""
    return packed.packed if isinstance(packed.packed, Tensor) else None


def _joint(gate: CudaWeight, up: CudaWeight) -> str:
    return gate.units if gate.units == up.units else "both"


def _of_gate_up(
    weights: tuple[CudaWeight, CudaWeight], top_k: int, swiglu_limit: float | None
) -> _Geometry:
    gate, up = weights
    divide = int(gate.divide) + 2 * int(up.divide)
    limit = _NO_CLAMP if swiglu_limit is None else swiglu_limit
    return _Geometry(gate.rows // PANEL, top_k, divide, limit)


def _of_down(down: CudaWeight) -> _Geometry:
    return _Geometry(-(-down.rows // (2 * PANEL)), 1, int(down.divide), _NO_CLAMP)


def _packed(rows: Rows, routes: RouteTable, gate: CudaWeight, top_k: int) -> Tensor:
    """The rows of x in packed order, in the call's scratch."""
    if not isinstance(rows.packed, Tensor):
        raise Unsupported(f"a tile wider than {WIDEST_GATHER} tokens needs scratch for packed rows")
    arguments = pointers(routes.offsets, routes.slots, rows.values, rows.packed)
    arguments += numbers(gate.columns, top_k)
    grid = (gate.num_experts, min(_PACKERS, routes.slots.shape[0]), _PACK_THREADS)
    queue(kernel(Pack()), rows.packed, grid, arguments, True)
    return rows.packed


def _packed_a8(
    rows: Rows, routes: RouteTable, weights: tuple[CudaWeight, CudaWeight], top_k: int
) -> Rows:
    """The quantised rows of x in packed order, in the call's scratch."""
    packed, (gate, up) = rows.packed, weights
    if not isinstance(packed, Rows):
        raise Unsupported("packed rows of class a8 need scratch for them")
    arguments = pointers(
        routes.offsets,
        routes.slots,
        rows.values,
        rows.scales,
        packed.values,
        _wide(packed),
        packed.scales,
        gate.on_fp8,
        up.on_fp8,
    )
    arguments += numbers(gate.columns, top_k)
    grid = (gate.num_experts, min(_PACKERS, routes.slots.shape[0]), _PACK_THREADS)
    queue(kernel(Pack("a8", _joint(gate, up))), rows.values, grid, arguments, True)
    return packed


def _launch(
    variant: Variant,
    weights: tuple[CudaWeight, CudaWeight],
    routes: RouteTable,
    tensors: tuple[Tensor, Tensor],
    geometry: _Geometry,
    early: bool,
    more: Sequence[Tensor | None] = (),
) -> None:
    """`more`: what only kernels of class a8 take."""
    first, out = weights[0], routes.slots
    num_slots = routes.slots.shape[0]
    arguments: list[Any] = [
        *(argument for weight in weights for argument in _projection(weight)),
        *pointers(routes.offsets, routes.slots, *tensors),
        *numbers(first.num_experts, first.columns, first.rows // PANEL),
        *numbers(geometry.top_k, geometry.divide),
        ctypes.c_float(geometry.limit),
        *pointers(*more),
    ]
    most = min(num_slots, num_slots // variant.tokens + first.num_experts) * geometry.pairs
    grid = (min(processors(out.device.index), most), 1, THREADS)
    queue(kernel(variant), out, grid, arguments, early)


def _projection(weight: CudaWeight) -> list[Any]:
    """Addresses, and bytes from expert to expert."""
    addresses = pointers(weight.codes, weight.scales, weight.factors)
    return addresses + [ctypes.c_uint64(t.stride(0)) for t in (weight.codes, weight.scales)]
