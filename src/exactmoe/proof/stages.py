"""Stages: the ops of a GPU's portable path one by one, each from its own actual inputs.

The order of a GPU's dots is its matrix instruction's, so their bits have no other definition than
known answers. All else has: the reference, fed with the kernel's float32 accumulators, must give
the same bytes; the dots are held against float64 (contract sections 4 and 8).

`down` with float32 slots gives acc x global scale of any projection, so it is what reads g and u.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from exactmoe import ops, reference
from exactmoe.config import Numerics
from exactmoe.formats import BLOCK, PackedWeight, apply_global_scale, operand
from exactmoe.formats.rows import Rows
from exactmoe.formats.scales import decode_e4m3
from exactmoe.reference.dot import DENSE_SEGMENT, SCALE_GROUP
from exactmoe.reference.functions import canonical, swiglu32, to_bf16
from exactmoe.runtime.routes import RouteTable

A16 = Numerics()
_WIDE = Numerics(slot="f32", output="f32")
_CHAIN_BOUND, _A8_BOUND = 2.0**-17, 2.0**-12
_ANY_DATA_BOUND = 2.0**-21


@dataclass(frozen=True, eq=False)
class Slots:
    """What a path makes of S = T x K slots, on its device; `a8` rows as (codes, scales).

    Attributes:
        x, h: rows as the dots read them.
        gate, up, down: float32 results of the three projections, global scale applied.
        raw_h: float32 [S, I] of `a8`, before its quantisation.
        slots: [S, H] as the combine reads them.
        routes: of the call.
    """

    x: Rows
    h: Rows
    gate: Tensor
    up: Tensor
    down: Tensor
    raw_h: Tensor
    slots: Tensor
    routes: RouteTable


def experts_of(weight: PackedWeight, experts: list[int]) -> PackedWeight:
    """A copy of some experts, canonical bytes."""
    index = torch.tensor(experts, device=weight.codes.device)
    parts: dict[str, Any] = {
        name: None if (tensor := getattr(weight, name)) is None else tensor[index]
        for name in ("codes", "scales", "global_scale")
    }
    return replace(weight, **parts)


def run_slots(
    path: ops.Path,
    weights: tuple[PackedWeight, PackedWeight, PackedWeight],
    x: Tensor,
    routed: tuple[Tensor, Tensor],
    numerics: Numerics,
    limit: float | None,
) -> Slots:
    """x bfloat16 [T, H], routed ids int32 and weights float32 [T, K] through the path's ops.

    weights: gate, up, down, canonical.
    """
    ids, factors = routed
    store, device, top_k = path.storage, x.device, ids.shape[1]
    count, hidden, inner = ids.numel(), x.shape[1], weights[0].rows
    a8 = numerics.activation == "a8"
    routes = RouteTable(
        torch.empty(weights[0].num_experts + 1, dtype=store.index, device=device),
        torch.empty(count, dtype=store.index, device=device),
        torch.zeros(1, dtype=torch.int64, device=device),
    )
    path.route_table(ids, weights[0].num_experts, routes)
    gate, up, down = (path.prepare(weight) for weight in weights)
    staged = x.to(store.x)
    rows = _quantized(path, staged) if a8 else Rows(staged, None)
    h = torch.empty(count, inner, dtype=torch.float32 if a8 else store.h, device=device)
    path.gate_up(rows, (gate, up), routes, factors if a8 else None, limit, h)
    h_rows = _quantized(path, h) if a8 else Rows(h, None)
    spread = Rows(
        _bytes_repeated(rows.values, top_k),
        None if rows.scales is None else rows.scales.repeat_interleave(top_k, 0),
    )
    wide = numerics if a8 else _WIDE
    g, u = (_projected(path, w, spread, routes, wide, inner) for w in (gate, up))
    slots = torch.empty(
        count,
        hidden,
        dtype=store.slots if numerics.slot == "bf16" else torch.float32,
        device=device,
    )
    path.down(h_rows, down, routes, numerics, slots)
    wide_slots = _projected(path, down, h_rows, routes, wide, hidden)
    return Slots(rows, h_rows, g, u, wide_slots, h, slots, routes)


def _quantized(path: ops.Path, values: Tensor) -> Rows:
    shape = (values.shape[0], values.shape[1] // SCALE_GROUP)
    codes = torch.empty(values.shape, dtype=path.storage.codes, device=values.device)
    return path.quantize(values, Rows(codes, torch.empty(shape, device=values.device)))


def _bytes_repeated(values: Tensor, top_k: int) -> Tensor:
    """Rows repeated; indexing e4m3 is not offered by every torch, so bytes are."""
    if values.dtype != torch.float8_e4m3fn:
        return values.repeat_interleave(top_k, 0)
    return values.view(torch.uint8).repeat_interleave(top_k, 0).view(values.dtype)


def _projected(
    path: ops.Path, weight: object, rows: Rows, routes: RouteTable, numerics: Numerics, width: int
) -> Tensor:
    found = torch.empty(rows.values.shape[0], width, device=rows.values.device)
    path.down(rows, weight, routes, numerics, found)
    return found


def project(path: ops.Path, weight: PackedWeight, x: Tensor) -> Tensor:
    """One dense projection on a path: x bf16 [T, K], one expert -> float32 [T, N].

    K above 4096 is cut into the contract's segments, which are added here (section 4).
    """
    total = torch.zeros(x.shape[0], weight.rows, device=x.device)
    unscaled = weight
    if weight.global_scale is not None:
        unscaled = replace(weight, global_scale=torch.ones_like(weight.global_scale))
    ids = torch.zeros(x.shape[0], 1, dtype=torch.int32, device=x.device)
    for start in range(0, weight.columns, DENSE_SEGMENT):
        part = columns_of(unscaled, start, min(start + DENSE_SEGMENT, weight.columns))
        routes = RouteTable(
            torch.empty(2, dtype=path.storage.index, device=x.device),
            torch.empty(len(x), dtype=path.storage.index, device=x.device),
            torch.zeros(1, dtype=torch.int64, device=x.device),
        )
        path.route_table(ids, 1, routes)
        rows = Rows(x[:, start : start + DENSE_SEGMENT].to(path.storage.x).contiguous(), None)
        total = total + _projected(path, path.prepare(part), rows, routes, _WIDE, weight.rows)
    return total if weight.global_scale is None else apply_global_scale(weight, 0, total)


def columns_of(weight: PackedWeight, start: int, end: int) -> PackedWeight:
    """A copy of columns start to end of a weight; start is a multiple of its block."""
    per_code = 2 if weight.format in ("nvfp4", "mxfp4") else 1
    codes = weight.codes[:, :, start // per_code : end // per_code].clone()
    scales = weight.scales
    if scales is not None:
        block = BLOCK[weight.format]
        scales = scales[:, :, start // block : -(-end // block)].clone()
    return replace(weight, codes=codes, scales=scales)


def expected_h(slots: Slots, limit: float | None, factors: Tensor, numerics: Numerics) -> Tensor:
    """h from the kernel's own g and u by the reference, on the CPU: bf16, or float32 in `a8`."""
    h = swiglu32(slots.gate.cpu(), slots.up.cpu(), limit)
    return canonical(h * factors.cpu().flatten()[:, None]) if _is_a8(numerics) else to_bf16(h)


def expected_slots(slots: Slots, numerics: Numerics) -> Tensor:
    """Slots from the kernel's float32 results: rounded once, or as they are; on the CPU."""
    found = slots.down.cpu()
    return to_bf16(found) if numerics.slot == "bf16" else canonical(found)


def combined(slots: Tensor, routed: tuple[Tensor, Tensor], experts: int, activation: str) -> Tensor:
    """Slots [S, H] to float32 [T, H] by the reference, on the CPU."""
    ids, weights = (t.cpu() for t in routed)
    wide = slots.float().cpu().view(*ids.shape, -1)
    return reference.combine(wide, ids, weights, experts, activation)


def true_dot(weight: PackedWeight, expert: int, rows: Rows) -> tuple[Tensor, Tensor]:
    """Float64 [T, N]: the result of a projection of the rows that were read, and the sum of
    magnitudes, on the rows' device.
    """
    w = operand(weight, expert).double()
    if weight.format == "fp8":
        assert weight.scales is not None
        spread = weight.scales[expert].double().repeat_interleave(128, 0)[: weight.rows]
        w = w * spread.repeat_interleave(128, 1)[:, : weight.columns]
    x = _values(rows)
    true, magnitude = x @ w.T, x.abs() @ w.abs().T
    one = torch.ones((), dtype=torch.float32, device=x.device)
    if weight.global_scale is not None and weight.global_scale_op == "divide":
        scale = 1.0 / weight.global_scale[expert].double()
    else:
        scale = apply_global_scale(weight, expert, one).double()
    return true * scale, magnitude * scale


def _values(rows: Rows) -> Tensor:
    values = rows.values
    if values.dtype == torch.float8_e4m3fn:
        values = decode_e4m3(values.view(torch.uint8))
    wide = values.double()
    return wide if rows.scales is None else wide * rows.scales.double().repeat_interleave(128, -1)


def errors(found: Tensor, true: Tensor, magnitude: Tensor) -> tuple[float, float]:
    """Relative L2 over all outputs, and the largest error against the sum of magnitudes."""
    error = found.double() - true
    size = true.norm()
    relative = float(error.norm() / size) if float(size) > 0 else float(error.norm())
    return relative, float((error.abs() / magnitude.clamp(min=2.0**-126)).max())


def bounds(columns: int, numerics: Numerics) -> tuple[float, float]:
    """What section 8 allows for `errors` of a dot over `columns` of k."""
    relative = _CHAIN_BOUND * max(1.0, columns / 4096)
    if _is_a8(numerics):
        relative = _A8_BOUND
    return relative, _ANY_DATA_BOUND * (columns / 16 + 4)


def _is_a8(numerics: Numerics) -> bool:
    return numerics.activation == "a8"
