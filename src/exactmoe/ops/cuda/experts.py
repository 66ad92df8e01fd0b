"""gate_up and down on sm_90: which kernel, how many blocks, which arguments."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from exactmoe.config import Numerics
from exactmoe.errors import Unsupported
from exactmoe.formats.rows import Rows
from exactmoe.kernels.cuda.compile import Kernel, kernel, pointer
from exactmoe.kernels.cuda.source import PANEL, THREADS, WIDEST_GATHER, Pack, Variant
from exactmoe.ops.cuda.prepare import CudaWeight
from exactmoe.plan.tiles import tile
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
    gate, up = gate_up
    num_slots, x = routes.slots.shape[0], rows.values
    if num_slots == 0:
        return
    chosen = tile("cuda", _ARCHITECTURE, "gate_up", num_slots, gate.num_experts)
    top_k, gather = num_slots // x.shape[0], chosen.tokens <= WIDEST_GATHER
    if not gather:
        x = _packed(rows, routes, gate, top_k)
    geometry = _Geometry(
        pairs=gate.rows // PANEL,
        top_k=top_k,
        divide=int(gate.divide) + 2 * int(up.divide),
        limit=_NO_CLAMP if swiglu_limit is None else swiglu_limit,
    )
    variant = Variant("gate_up", gate.format, chosen.tokens, gather)
    _launch(variant, (gate, up), routes, (x, h), geometry, True)


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
    geometry = _Geometry(-(-down.rows // (2 * PANEL)), 1, int(down.divide), _NO_CLAMP)
    _launch(variant, (down, down), routes, (h.values, slots), geometry, early)


def _packed(rows: Rows, routes: RouteTable, gate: CudaWeight, top_k: int) -> Tensor:
    """The rows of x in packed order, in the call's scratch."""
    if rows.packed is None:
        raise Unsupported(f"a tile wider than {WIDEST_GATHER} tokens needs scratch for packed rows")
    tensors = (routes.offsets, routes.slots, rows.values, rows.packed)
    arguments: list[Any] = [pointer(t) for t in tensors]
    arguments += [ctypes.c_uint32(gate.columns), ctypes.c_uint32(top_k)]
    grid = (gate.num_experts, min(_PACKERS, routes.slots.shape[0]), _PACK_THREADS)
    _queue(kernel(Pack()), rows.packed, grid, arguments, True)
    return rows.packed


def _launch(
    variant: Variant,
    weights: tuple[CudaWeight, CudaWeight],
    routes: RouteTable,
    tensors: tuple[Tensor, Tensor],
    geometry: _Geometry,
    early: bool,
) -> None:
    first, out = weights[0], tensors[1]
    num_slots = routes.slots.shape[0]
    numbers = (
        first.num_experts,
        first.columns,
        first.rows // PANEL,
        geometry.top_k,
        geometry.divide,
    )
    arguments: list[Any] = [
        *(argument for weight in weights for argument in _projection(weight)),
        *(pointer(t) for t in (routes.offsets, routes.slots, *tensors)),
        *(ctypes.c_uint32(number) for number in numbers),
        ctypes.c_float(geometry.limit),
    ]
    most = min(num_slots, num_slots // variant.tokens + first.num_experts) * geometry.pairs
    grid = (min(_processors(out.device.index), most), 1, THREADS)
    _queue(kernel(variant), out, grid, arguments, early)


def _projection(weight: CudaWeight) -> list[Any]:
    """Addresses, and bytes from expert to expert."""
    addresses = [pointer(t) for t in (weight.codes, weight.scales, weight.factors)]
    return addresses + [ctypes.c_uint64(t.stride(0)) for t in (weight.codes, weight.scales)]


def _queue(
    what: Kernel, on: Tensor, grid: tuple[int, int, int], arguments: Sequence[Any], early: bool
) -> None:
    device = on.device.index
    what.launch(device, torch.cuda.current_stream(device).cuda_stream, grid, arguments, early)


@cache
def _processors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
