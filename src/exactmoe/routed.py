"""The routed experts of one piece: route table, gate_up, (quantize), down.

Two switches take the same slots another way, for comparison: `EXACTMOE_UNION=off` runs token by
token, so that each reads its own experts; `EXACTMOE_HOST_LOOP=on` lets the host read the route
table and launch each expert by itself.
"""

import logging
from typing import TYPE_CHECKING

from torch import Tensor

from exactmoe.block import Space, lever
from exactmoe.errors import Unsupported
from exactmoe.formats.rows import Rows
from exactmoe.plan import tiles_of
from exactmoe.runtime import notes
from exactmoe.runtime.devices import capturing
from exactmoe.runtime.routes import RouteTable

if TYPE_CHECKING:
    from exactmoe.layer import MoELayer


def routed_slots(
    layer: "MoELayer", space: Space, x: Tensor, routed: tuple[Tensor, Tensor]
) -> Tensor:
    """x [T, H] and routed (expert_ids, weights) [T, K] -> slots [S, H], at their places."""
    ids, weights = routed
    slots = space.rows("slots", ids.numel())
    _say_once(layer, space, ids.numel())
    if not space.path.storage.reads_given or lever("EXACTMOE_UNION"):
        _run(layer, space, x, routed, slots)
        return slots
    for token, top_k in enumerate([ids.shape[1]] * ids.shape[0]):
        one = slice(token, token + 1)
        own = slots[token * top_k : (token + 1) * top_k]
        _run(layer, space, x[one], (ids[one], weights[one]), own)
    return slots


def _run(
    layer: "MoELayer", space: Space, x: Tensor, routed: tuple[Tensor, Tensor], slots: Tensor
) -> None:
    """As `routed_slots`, into `slots`."""
    (ids, weights), path, num_slots = routed, space.path, slots.shape[0]
    a8 = layer.numerics.activation == "a8"
    gate, up, down = layer.bank.prepared_for(path)
    table = RouteTable(space.arrays["offsets"], space.rows("sorted", num_slots), layer.fault)
    path.route_table(ids, layer.config.num_experts, table)
    launches = _launches(layer, space, table)

    store = path.storage
    count = num_slots if a8 else store.rows_of_h(num_slots, layer.config.num_experts)
    packed = space.rows("packed_x", count) if store.packed else None
    rows, h = Rows(x, None, packed), space.rows("h", count)
    if a8:
        rows = path.quantize(x, _scaled(space, "x", x.shape[0]))
    for routes in launches:
        limit = layer.config.swiglu_limit
        path.gate_up(rows, (gate, up), routes, weights if a8 else None, limit, h)
    h_rows = path.quantize(h, _scaled(space, "h", num_slots)) if a8 else Rows(h, None)
    for routes in launches:
        path.down(h_rows, down, routes, layer.numerics, slots)


def _scaled(space: Space, name: str, count: int) -> Rows:
    return Rows(space.rows(f"{name}_codes", count), space.rows(f"{name}_scales", count))


def _launches(layer: "MoELayer", space: Space, table: RouteTable) -> list[RouteTable]:
    """What gate_up and down are launched for: all experts at once, or one at a time."""
    if not space.path.storage.reads_given or not lever("EXACTMOE_HOST_LOOP"):
        return [table]
    if capturing(layer.device):
        raise Unsupported("EXACTMOE_HOST_LOOP is on, which no CUDA graph can hold; allowed: off")
    bounds = table.offsets.tolist()
    pairs = [(low, high) for low, high in zip(bounds, bounds[1:], strict=False) if high > low]
    if space.path.storage.packed:  # an expert's place in packed rows is where all slots put it
        return [RouteTable(table.offsets.clamp(*pair), table.slots, table.fault) for pair in pairs]
    return [
        RouteTable(table.offsets.clamp(low, high) - low, table.slots[low:], table.fault)
        for low, high in pairs
    ]


def _say_once(layer: "MoELayer", space: Space, num_slots: int) -> None:
    """One line a path and tile, when it first runs."""
    device, name = layer.device, space.path.name

    def text() -> str:
        tiles = tiles_of(layer.plan(), num_slots, layer.config.num_experts)
        chosen = "; ".join(f"{choice.op}: {choice.tile}" for choice in tiles)
        return f"backend {name} on {device} runs" + (f" with tiles {chosen}" if chosen else "")

    notes.once(logging.INFO, (device, name, num_slots), text)
