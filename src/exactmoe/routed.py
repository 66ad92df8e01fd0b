"""The routed experts of one piece, on one card or several: route table, gate_up, (quantize), down.

Two switches take the same slots another way, for comparison: `EXACTMOE_UNION=off` runs token by
token, so that each reads its own experts; `EXACTMOE_HOST_LOOP=on` lets the host read the route
table and launch each expert by itself.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from exactmoe import env
from exactmoe.bank import ExpertBank, SplitBank
from exactmoe.block import Space, lever, say_first
from exactmoe.config import MoEConfig, Numerics
from exactmoe.errors import Unsupported
from exactmoe.formats.rows import Rows
from exactmoe.formats.units import PIECE
from exactmoe.ops import Path, Storage
from exactmoe.ops.path import ExpertSettings
from exactmoe.parallel import Answer, Cards, Message, Program, Vectors, Wire, exchange
from exactmoe.parallel.cards import OWNER, arrays_of, prefixed
from exactmoe.plan import TileChoice, first_line, tiles_of
from exactmoe.plan.tiles import TILES, in_one_launch
from exactmoe.runtime import workspace
from exactmoe.runtime.devices import capturing
from exactmoe.runtime.routes import RouteTable
from exactmoe.runtime.workspace import Arena, Region

if TYPE_CHECKING:
    from exactmoe.layer import MoELayer


def expert_regions(
    config: MoEConfig, num_experts: int, rows: int, storage: Storage
) -> list[Region]:
    """The arrays of `num_experts` routed experts of one card, for a piece of `rows` tokens."""
    numerics, hidden, inner = (
        Numerics.of(config.numerics),
        config.hidden_size,
        config.intermediate_size,
    )
    slots, a8, f32 = rows * config.top_k, numerics.activation == "a8", torch.float32
    h_rows = storage.rows_of_h(slots, num_experts)
    regions = [
        Region("offsets", (num_experts + 1,), storage.index),
        Region("sorted", (slots,), storage.index),
        Region("slots", (slots, hidden), storage.slots if numerics.slot == "bf16" else f32),
    ]
    if storage.units:
        packed = {"h": inner, "packed": hidden}
        regions += [r for name, k in packed.items() for r in _quantized(name, h_rows, k, storage)]
    elif a8:
        regions.append(Region("h", (slots, inner), f32))
        regions.append(Region("h_codes", (slots, inner), storage.codes))
        regions.append(Region("h_scales", (slots, inner // PIECE), f32))
    else:
        regions.append(Region("h", (h_rows, inner), storage.h))
    if storage.packed and not storage.units:
        regions.append(Region("packed_x", (h_rows, hidden), storage.x))
    return regions


def _quantized(name: str, rows: int, k: int, storage: Storage) -> list[Region]:
    """Packed rows of `a8`: e4m3 for experts on the fp8 units, bf16 for those on the bf16 units, and
    scales; an expert's bytes decide which of the two it reads.
    """
    regions = [Region(f"{name}_scales", (rows, k // PIECE), torch.float32)]
    if storage.units != "bf16":
        regions.append(Region(f"{name}_codes", (rows, k), storage.codes))
    if storage.units != "fp8":
        regions.append(Region(f"{name}_wide", (rows, k), storage.x))
    return regions


def card_regions(
    config: MoEConfig, cards: Cards, card: int, rows: int, storage: Storage
) -> list[Region]:
    """All that one of several cards needs for a piece of `rows` tokens, under its own names."""
    own = expert_regions(config, cards.partition.counts[card], rows, storage)
    return prefixed(card, [*own, *cards.regions(card, rows, config, storage)])


def card_space(layer: "MoELayer", cards: Cards, path: Path, held: Arena, rows: int) -> Space:
    """What a call on several cards runs with, each card's arrays on its own device."""
    assert isinstance(layer.bank, SplitBank)
    _require_at_home(cards, layer.bank)
    home, *others = layer.devices
    arenas = {home: held, **{device: workspace.beside(held, device) for device in others}}

    def make() -> Space:
        arrays: dict[str, Tensor] = {}
        for device, arena in arenas.items():
            arrays |= arena.views(layer.regions_on(device, rows, path.storage))
        own = tuple(
            Space(path, arrays_of(card, arrays), arenas[device])
            for card, device in enumerate(cards.devices)
        )
        return Space(path, arrays, held, own)

    key = (rows, path.name, *(arena.generation for arena in arenas.values()))
    return held.kept_for(layer, key, make)


def answered(
    layer: "MoELayer", space: Space, x: Tensor, routed: tuple[Tensor, Tensor]
) -> Answer | Vectors:
    """x [T, H] and routed (expert_ids, weights) [T, K] -> what the token's card combines."""
    if layer.cards is None:
        slots = routed_slots(layer, space, x, routed)
        return Answer(slots, routed, layer.config.num_experts, layer.numerics)
    message = Message(Rows(x, None), *routed)
    say_once(layer, space, message.ids.numel())
    if space.path.storage.reads_given and not lever("EXACTMOE_UNION"):
        raise Unsupported("EXACTMOE_UNION is off, and several cards run all tokens at once")
    if layer.numerics.activation == "a8":  # once, for all cards
        rows = space.path.quantize(x, _scaled(space, "x", x.shape[0]))
        message = message._replace(rows=rows)
    cards, bank = layer.cards, layer.bank
    assert isinstance(bank, SplitBank)

    def start(card: int, message: Message) -> Program:
        own = space.cards[card]
        if space.spans is not None:
            own = own.recorded(space.spans, card)
        fault = layer.fault if card == OWNER else own.arrays["fault"]
        return program(layer, bank[card], own, message, fault)

    arrays = tuple(own.arrays for own in space.cards)
    lanes = space.arena.lanes(cards.devices)
    watched = (space.spans, layer.card_load)
    wire = Wire(space.path, arrays, lanes, layer.config, layer.lost, *watched)
    return exchange(cards, wire, message, start)


def _require_at_home(cards: Cards, bank: SplitBank) -> None:
    if bank.cards != cards.devices:
        raise Unsupported(
            f"the experts are on {tuple(map(str, bank.cards))}, the layer was placed on "
            f"{tuple(map(str, cards.devices))}; allowed: a layer that is made for where they are"
        )


def routed_slots(
    layer: "MoELayer", space: Space, x: Tensor, routed: tuple[Tensor, Tensor]
) -> Tensor:
    """x [T, H] and routed (expert_ids, weights) [T, K] -> slots [S, H], at their places, of a layer
    on one card.
    """
    (ids, weights), bank = routed, layer.bank
    assert isinstance(bank, ExpertBank)
    slots = space.rows("slots", ids.numel())
    say_once(layer, space, ids.numel())
    if not space.path.storage.reads_given or lever("EXACTMOE_UNION"):
        _run(program(layer, bank, space, Message(Rows(x, None), ids, weights), layer.fault))
        return slots
    for token, top_k in enumerate([ids.shape[1]] * ids.shape[0]):
        one = slice(token, token + 1)
        message = Message(Rows(x[one], None), ids[one], weights[one])
        _run(program(layer, bank, space, message, layer.fault, token * top_k))
    return slots


def _run(program: Program) -> None:
    program.gate_up()
    program.down()


def program(
    layer: "MoELayer",
    bank: ExpertBank,
    space: Space,
    message: Message,
    fault: Tensor,
    first_slot: int = 0,
) -> Program:
    """Makes the route table, then gives the launches of a card's experts: into its slots from
    `first_slot` on. Ids are local ones.
    """
    (rows, ids, weights), path, num_slots = message, space.path, message.ids.numel()
    a8 = layer.numerics.activation == "a8"
    slots = space.arrays["slots"][first_slot : first_slot + num_slots]
    gate, up, down = bank.prepared_for(path)
    table = RouteTable(space.arrays["offsets"], space.rows("sorted", num_slots), fault)
    path.route_table(ids, bank.num_experts, table)
    launches = _launches(layer, space, table)

    store = path.storage
    limit = layer.config.swiglu_limit
    count = store.rows_of_h(num_slots, bank.num_experts)
    if a8 and rows.scales is None:
        rows = path.quantize(rows.values, _scaled(space, "x", rows.values.shape[0]))
    if store.units:
        packed = _packed(space, "h", count)
        rows = Rows(rows.values, rows.scales, _packed(space, "packed", count))

        if _in_one_launch(space, num_slots):
            settings = ExpertSettings(limit, layer.numerics, weights)
            return _in_one(path, rows, (gate, up, down), launches, settings, packed, slots)

        def first_quantized() -> None:
            for routes in launches:
                path.gate_up_quantized(rows, (gate, up, down), routes, weights, limit, packed)

        def second_quantized() -> None:
            for routes in launches:
                path.down(packed, down, routes, layer.numerics, slots)

        return Program(first_quantized, second_quantized)
    h = space.rows("h", count)
    if store.packed:
        rows = Rows(rows.values, rows.scales, space.rows("packed_x", count))

        if _in_one_launch(space, num_slots):
            settings = ExpertSettings(limit, layer.numerics, None)
            return _in_one(path, rows, (gate, up, down), launches, settings, Rows(h, None), slots)

    def first() -> None:
        for routes in launches:
            path.gate_up(rows, (gate, up), routes, weights if a8 else None, limit, h)

    def second() -> None:
        h_rows = path.quantize(h, _scaled(space, "h", num_slots)) if a8 else Rows(h, None)
        for routes in launches:
            path.down(h_rows, down, routes, layer.numerics, slots)

    return Program(first, second)


def _in_one_launch(space: Space, num_slots: int) -> bool:
    """Steps that somebody times are launched one by one."""
    one = space.path.storage.one_launch and in_one_launch(num_slots, lever("EXACTMOE_EXPERTS"))
    return one and space.spans is None


def _in_one(
    path: Path,
    rows: Rows,
    weights: tuple[Any, Any, Any],
    launches: list[RouteTable],
    settings: ExpertSettings,
    h: Rows,
    slots: Tensor,
) -> Program:
    def both() -> None:
        for routes in launches:
            path.gate_up_down(rows, weights, routes, settings, h, slots)

    return Program(both, lambda: None)


def _packed(space: Space, name: str, count: int) -> Rows:
    """Packed rows: values are those of the fp8 units, or where none takes them those of bf16."""
    codes, wide = (
        space.rows(part, count) if part in space.arrays else None
        for part in (f"{name}_codes", f"{name}_wide")
    )
    values = wide if codes is None else codes
    assert values is not None
    return Rows(values, space.rows(f"{name}_scales", count), wide)


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


def expert_tiles(layer: "MoELayer", num_slots: int) -> tuple[TileChoice, ...]:
    """The tiles that run the routed experts of a piece of S slots, on each card."""
    plan = layer.plan()
    if plan.backend in TILES and not env.read("EXACTMOE_UNION"):
        num_slots = min(num_slots, layer.config.top_k)
    return tiles_of(plan, layer.numerics, layer.bank.shapes, num_slots, layer.expert_counts)


def say_once(layer: "MoELayer", space: Space, num_slots: int) -> None:
    """One line a path and tile, when it first runs."""

    def text() -> str:
        tiles = expert_tiles(layer, num_slots)
        return first_line(layer.plan(), layer.numerics, layer.bank.formats, tiles)

    say_first(space, layer.kind, num_slots, text)
