"""What is launched for gate_up and down of class a8 on sm_90: kernels, grids and arguments."""

from math import ceil, inf

import pytest
import torch

from cuda_code import a8_variants
from exactmoe.config import Numerics
from exactmoe.errors import Unsupported
from exactmoe.formats.rows import Rows
from exactmoe.kernels.cuda.source import THREADS, UNITS, Pack
from exactmoe.ops import PACKED
from exactmoe.ops.cuda import experts
from exactmoe.ops.cuda.experts import Experts
from exactmoe.plan.tiles import TILES
from fake_launches import BLOCK, keep_launches, routes_of, told, weight

E4M3 = torch.float8_e4m3fn
A8 = Numerics.preset("a8")


@pytest.fixture
def launched(monkeypatch):
    return keep_launches(monkeypatch)


def packed_rows(count: int, columns: int, units: str = "auto") -> Rows:
    """Scratch for packed rows as routed.py lays it out, by Storage.units."""
    codes = torch.empty(count, columns, dtype=E4M3)
    wide = torch.empty(count, columns, dtype=torch.bfloat16)
    scales = torch.empty(count, columns // 128)
    if units == "auto":
        return Rows(codes, scales, wide)
    return Rows(codes, scales) if units == "fp8" else Rows(wide, scales, wide)


def run_gate_up(weights, tokens=3, top_k=2, limit=None, units="auto", scratch=True, both=False):
    """Or both: then slots come last."""
    gate, _, down = weights
    count = PACKED.rows_of_h(tokens * top_k, gate.num_experts)
    packed = packed_rows(count, gate.columns, units) if scratch else None
    x = Rows(
        torch.empty(tokens, gate.columns, dtype=E4M3),
        torch.empty(tokens, gate.columns // 128),
        packed,
    )
    h = packed_rows(count, down.columns, units)
    routes, routing = routes_of(tokens * top_k, gate.num_experts), torch.empty(tokens, top_k)
    given, out = (
        Experts(weights, routes, limit, A8, routing),
        torch.empty(tokens * top_k, down.rows),
    )
    if both:
        experts.gate_up_down(given, x, h, out)
        return x, h, routes, routing, out
    experts.gate_up(given, x, h)
    return x, h, routes, routing


def run_down(down, slots=6, early=False, units="auto"):
    h = packed_rows(PACKED.rows_of_h(slots, down.num_experts), down.columns, units)
    routes, out = routes_of(slots, down.num_experts), torch.empty(slots, down.rows)
    experts.down(Experts((None, None, down), routes, None, A8), h, out, early)
    return h, out, routes


def layer_of(format="nvfp4", gate="fp8", up=None, down="fp8", **sizes):
    """gate, up and down [4, 256, 384] and [4, 384, 256] on these units."""
    back = {"rows": 384, "columns": 256, **sizes}
    pair = (weight(format, units=units, **sizes) for units in (gate, up or gate))
    return (*pair, weight(format, units=down, **back))


def named(weights):
    return dict(zip(("gate", "up", "down"), weights, strict=True))


@pytest.mark.parametrize("both", [False, True], ids=["gate_up", "both"])
@pytest.mark.parametrize("format", BLOCK)
def test_few_tokens_on_the_fp8_units(launched, format, both):
    """Rows are gathered from x; no other units read them."""
    weights = layer_of(format)
    x, h, routes, routing, *out = run_gate_up(weights, limit=1.5, both=both)
    (one,) = launched
    assert one.what in a8_variants() and one.early
    assert (one.what.format, one.what.tokens) == (format, 8)
    assert (one.what.units, one.what.gather, one.what.slot_f32) == ("fp8", True, True)
    assert one.arguments == told(
        named(weights),
        routes,
        x=Rows(x.values, x.scales),
        h=h,
        out=out[0] if both else None,
        weights=routing,
        num_experts=4,
        hidden=384,
        inner=256,
        top_k=2,
        phases=3 if both else 1,
        limit=1.5,
    )


@pytest.mark.parametrize(
    ("gate", "up", "down", "packed", "joint"),
    [
        ("bf16", "bf16", "bf16", "bf16", "bf16"),
        ("both", "both", "both", "both", "both"),
        ("fp8", "bf16", "both", "both", "both"),
        ("bf16", "fp8", "fp8", "both", "both"),
        ("both", "fp8", "bf16", "both", "both"),
        ("bf16", "bf16", "fp8", "bf16", "both"),
        ("fp8", "fp8", "bf16", "fp8", "both"),
    ],
)
def test_other_units_read_packed_rows_at_every_width(launched, gate, up, down, packed, joint):
    """gate and up of an expert are one work item, whose rows may be wanted as both; x is packed for
    these two, h for down.
    """
    weights = layer_of("mxfp4", gate, up, down)
    x, h, routes, _ = run_gate_up(weights)
    pack, one = launched
    assert pack.what == Pack("a8", packed) and pack.early
    assert pack.grid == (4, 6, 256)
    assert pack.arguments == {
        "offsets": routes.offsets.data_ptr(),
        "slots": routes.slots.data_ptr(),
        "codes": x.values.data_ptr(),
        "scales": x.scales.data_ptr(),
        "packed": x.packed.values.data_ptr(),
        "wide": x.packed.packed.data_ptr(),
        "packed_scales": x.packed.scales.data_ptr(),
        "on_fp8": weights[0].on_fp8.data_ptr(),
        "also_on_fp8": weights[1].on_fp8.data_ptr(),
        "k": 384,
        "top_k": 2,
    }
    assert one.what in a8_variants() and one.early
    assert (one.what.units, one.what.gather) == (joint, False)
    for name, rows in (("x", x.packed), ("h", h)):
        assert one.arguments[f"{name}.values"] == rows.values.data_ptr()
        assert one.arguments[f"{name}.wide"] == rows.packed.data_ptr()
        assert one.arguments[f"{name}.scales"] == rows.scales.data_ptr()
    assert one.arguments["limit"] == inf


def test_many_tokens_are_packed_first(launched):
    x, _, _, _ = run_gate_up(layer_of(), tokens=300, top_k=3)
    pack, one = launched
    assert pack.what == Pack("a8", "fp8") and pack.grid == (4, 8, 256)
    assert (one.what.tokens, one.what.gather) == (112, False)
    assert one.arguments["x.values"] == x.packed.values.data_ptr()
    assert one.arguments["x.scales"] == x.packed.scales.data_ptr()
    assert one.arguments["top_k"] == 3


def test_the_widest_tile_is_for_experts_on_the_fp8_units(launched):
    for units in UNITS:
        for both in (False, True):
            run_gate_up(layer_of(down=units), tokens=300, both=both)
            assert launched[-1].what.tokens == (112 if units == "fp8" else 64)


@pytest.mark.parametrize("units", ["bf16", "fp8"])
def test_one_kind_of_units_has_scratch_for_itself_only(launched, units):
    """Storage.units of the path: what the other units would read is a null pointer, or the same."""
    weights = layer_of(gate=units, down=units)
    x, h, _, _ = run_gate_up(weights, tokens=300, units=units)
    pack, one = launched
    wide = x.packed.values.data_ptr() if units == "bf16" else None
    assert pack.arguments["wide"] == one.arguments["x.wide"] == wide
    assert one.arguments["h.wide"] == (h.values.data_ptr() if units == "bf16" else None)
    h, _, _ = run_down(weights[2], units=units)
    assert launched[-1].arguments["h.wide"] == (h.values.data_ptr() if units == "bf16" else None)


def test_packed_rows_need_scratch(launched):
    for weights, tokens in ((layer_of(gate="both"), 3), (layer_of(), 300)):
        with pytest.raises(Unsupported, match="packed rows of class a8 need scratch"):
            run_gate_up(weights, tokens, scratch=False)
    assert launched == []
    run_gate_up(layer_of(), scratch=False)
    assert len(launched) == 1


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("units", UNITS)
def test_down(launched, units, early):
    down = weight("mxfp4", rows=384, columns=256, units=units)
    h, out, routes = run_down(down, early=early)
    (one,) = launched
    assert one.what in a8_variants() and one.early == early
    assert (one.what.format, one.what.tokens) == ("mxfp4", 8)
    assert (one.what.units, one.what.slot_f32) == (units, True)
    sizes = {"num_experts": 4, "hidden": 384, "inner": 256, "top_k": 1}
    assert one.arguments == told({"down": down}, routes, h=h, out=out, phases=2, limit=inf, **sizes)


def test_each_projection_may_divide(launched):
    for gate in (False, True):
        for up in (False, True):
            pair = (weight(divide=d, units="fp8") for d in (gate, up))
            run_gate_up((*pair, weight(rows=384, columns=256)))
            assert launched[-1].arguments["divide"] == gate + 2 * up
        run_down(weight(divide=gate))
        assert launched[-1].arguments["divide"] == 4 * gate


def test_no_slots_launch_nothing(launched):
    run_gate_up(layer_of(), tokens=0)
    run_gate_up(layer_of(gate="both"), tokens=3, top_k=0)
    run_gate_up(layer_of(), tokens=0, both=True)
    run_down(weight(), slots=0)
    assert launched == []


@pytest.mark.parametrize("op", ["gate_up", "down"])
@pytest.mark.parametrize(("num_experts", "tokens"), [(1, 1), (5, 40), (256, 700)])
def test_a_block_for_each_item(launched, op, num_experts, tokens, rng):
    """Items of any routing: tiles of each expert, times pairs of panels."""
    slots, blocks = 3 * tokens, 5 if op == "gate_up" else 3
    if op == "down":
        run_down(weight(num_experts=num_experts, rows=640), slots)
    else:
        pair = (weight(num_experts=num_experts, rows=640, units="fp8") for _ in range(2))
        run_gate_up((*pair, weight(num_experts=num_experts, columns=640)), tokens, 3)
    one = launched[-1]
    ids = torch.randint(0, num_experts, (slots,), generator=rng)
    for counts in (ids.bincount(minlength=num_experts), torch.tensor([slots])):
        assert one.grid[0] >= int(sum(ceil(n / one.what.tokens) for n in counts.tolist())) * blocks
    assert one.grid[0] <= slots * blocks
    assert one.grid[1:] == (1, THREADS)


def test_every_tile_launches_a_variant_whose_code_is_tested(launched, monkeypatch):
    """tests/kernels/cuda compiles `a8_variants()`; no other is launched."""
    small = {"num_experts": 256, "rows": 128, "columns": 128}
    for tile in TILES["cuda_a8"]["gate_up"]:
        monkeypatch.setenv("EXACTMOE_TILE", str(tile.tokens))
        for slots in (4, 800):
            for format in BLOCK:
                for units in UNITS:
                    layer = layer_of(format, units, down=units, **small)
                    for both in (False, True):
                        run_gate_up(layer, slots // 2, 2, both=both)
                    run_down(layer[2], slots)
    packs = {Pack("a8", units) for units in UNITS}
    assert {one.what for one in launched} == set(a8_variants()) | packs
