"""What is launched for gate_up and down of class a8 on sm_90: kernels, grids and arguments."""

from math import ceil, inf

import pytest
import torch

from cuda_code import a8_variants
from exactmoe.errors import Unsupported
from exactmoe.formats.rows import Rows
from exactmoe.kernels.cuda.source import THREADS, UNITS, Pack
from exactmoe.ops import PACKED
from exactmoe.ops.cuda import experts
from exactmoe.plan.tiles import TILES
from fake_launches import BLOCK, addresses, keep_launches, routes_of, weight

E4M3 = torch.float8_e4m3fn


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


def run_gate_up(weights, tokens=3, top_k=2, limit=None, units="auto", scratch=True):
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
    experts.gate_up_a8(x, weights, routes, routing, limit, h)
    return x, h, routes, routing


def run_down(down, slots=6, early=False, units="auto"):
    h = packed_rows(PACKED.rows_of_h(slots, down.num_experts), down.columns, units)
    routes, out = routes_of(slots, down.num_experts), torch.empty(slots, down.rows)
    experts.down_a8(h, down, routes, out, early)
    return h, out, routes


def layer_of(format="nvfp4", gate="fp8", up=None, down="fp8", **sizes):
    """gate, up and down [4, 256, 384] and [4, 384, 256] on these units."""
    back = {"rows": 384, "columns": 256, **sizes}
    pair = (weight(format, units=units, **sizes) for units in (gate, up or gate))
    return (*pair, weight(format, units=down, **back))


def address(tensor) -> int | None:
    """A null pointer is None."""
    return None if tensor is None else tensor.data_ptr()


def rows_arguments(prefix: str, rows: Rows) -> dict[str, int | None]:
    wide = rows.packed if isinstance(rows.packed, torch.Tensor) else None
    return {f"wide_{prefix}": address(wide), f"{prefix}_scales": address(rows.scales)}


@pytest.mark.parametrize("down", UNITS)
@pytest.mark.parametrize("format", BLOCK)
def test_gate_up_of_few_tokens_on_the_fp8_units(launched, format, down):
    """Rows are gathered from x; no other units read them."""
    weights = layer_of(format, "fp8", down=down)
    x, h, routes, routing = run_gate_up(weights, limit=1.5)
    (one,) = launched
    assert one.what in a8_variants()
    assert (one.what.units, one.what.down_units, one.what.gather) == ("fp8", down, True)
    assert (one.what.op, one.what.format, one.what.tokens) == ("gate_up", format, 8)
    assert one.early
    gate, up, below = weights
    assert one.arguments == {
        **addresses("first", gate),
        **addresses("second", up),
        "offsets": routes.offsets.data_ptr(),
        "slots": routes.slots.data_ptr(),
        "x": x.values.data_ptr(),
        "out": h.values.data_ptr(),
        "num_experts": 4,
        "k": 384,
        "panels": 2,
        "top_k": 2,
        "divide": 0,
        "limit": 1.5,
        "wide_x": None,
        "x_scales": x.scales.data_ptr(),
        "first_on_fp8": gate.on_fp8.data_ptr(),
        "second_on_fp8": up.on_fp8.data_ptr(),
        **rows_arguments("h", h),
        "down_on_fp8": below.on_fp8.data_ptr(),
        "weights": routing.data_ptr(),
    }


@pytest.mark.parametrize(
    ("gate", "up", "joint"),
    [
        ("bf16", "bf16", "bf16"),
        ("both", "both", "both"),
        ("fp8", "bf16", "both"),
        ("bf16", "fp8", "both"),
        ("both", "fp8", "both"),
    ],
)
def test_other_units_read_packed_rows_at_every_width(launched, gate, up, joint):
    """gate and up of an expert are one work item, whose rows may be wanted as both."""
    weights = layer_of("mxfp4", gate, up, "both")
    x, h, routes, _ = run_gate_up(weights)
    pack, one = launched
    assert pack.what == Pack("a8", joint) and pack.early
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
    assert (one.what.units, one.what.down_units, one.what.gather) == (joint, "both", False)
    assert one.arguments["x"] == x.packed.values.data_ptr()
    assert {name: one.arguments[name] for name in ("wide_x", "x_scales")} == rows_arguments(
        "x", x.packed
    )
    assert one.arguments["out"] == h.values.data_ptr()
    assert one.arguments["limit"] == inf


def test_many_tokens_are_packed_first(launched):
    x, _, _, _ = run_gate_up(layer_of(), tokens=300, top_k=3)
    pack, one = launched
    assert pack.what == Pack("a8", "fp8") and pack.grid == (4, 8, 256)
    assert (one.what.tokens, one.what.gather) == (112, False)
    assert one.arguments["x"] == x.packed.values.data_ptr()
    assert one.arguments["x_scales"] == x.packed.scales.data_ptr()
    assert one.arguments["top_k"] == 3


@pytest.mark.parametrize("units", ["bf16", "fp8"])
def test_one_kind_of_units_has_scratch_for_itself_only(launched, units):
    """Storage.units of the path: what the other units would read is a null pointer, or the same."""
    weights = layer_of(gate=units, down=units)
    x, h, _, _ = run_gate_up(weights, tokens=300, units=units)
    pack, one = launched
    wide = x.packed.values.data_ptr() if units == "bf16" else None
    assert pack.arguments["wide"] == one.arguments["wide_x"] == wide
    assert one.arguments["wide_h"] == (h.values.data_ptr() if units == "bf16" else None)
    h, _, _ = run_down(weights[2], units=units)
    assert launched[-1].arguments["wide_x"] == (h.values.data_ptr() if units == "bf16" else None)


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
    assert (one.what.op, one.what.format, one.what.tokens) == ("down", "mxfp4", 8)
    assert (one.what.units, one.what.slot_f32) == (units, True)
    assert one.arguments == {
        **addresses("first", down),
        **addresses("second", down),
        "offsets": routes.offsets.data_ptr(),
        "slots": routes.slots.data_ptr(),
        "x": h.values.data_ptr(),
        "out": out.data_ptr(),
        "num_experts": 4,
        "k": 256,
        "panels": 3,
        "top_k": 1,
        "divide": 0,
        "limit": inf,
        **rows_arguments("x", h),
        "first_on_fp8": down.on_fp8.data_ptr(),
        "second_on_fp8": down.on_fp8.data_ptr(),
        **dict.fromkeys(("wide_h", "h_scales", "down_on_fp8", "weights")),
    }


def test_each_projection_may_divide(launched):
    for gate in (False, True):
        for up in (False, True):
            pair = (weight(divide=d, units="fp8") for d in (gate, up))
            run_gate_up((*pair, weight(rows=384, columns=256)))
            assert launched[-1].arguments["divide"] == gate + 2 * up
        run_down(weight(divide=gate))
        assert launched[-1].arguments["divide"] == gate


def test_no_slots_launch_nothing(launched):
    run_gate_up(layer_of(), tokens=0)
    run_gate_up(layer_of(gate="both"), tokens=3, top_k=0)
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
                    for down in UNITS:
                        layer = layer_of(format, units, down=down, **small)
                        run_gate_up(layer, slots // 2, 2)
                    run_down(weight(format, units=units, **small), slots)
    packs = {Pack("a8", units) for units in UNITS}
    assert {one.what for one in launched} == set(a8_variants()) | packs
