"""What is launched for gate_up and down of class a16 on sm_90: kernels, grids and arguments."""

from dataclasses import replace
from math import ceil, inf

import pytest
import torch

from cuda_code import variants
from exactmoe.config import Numerics
from exactmoe.errors import Unsupported
from exactmoe.formats.rows import Rows
from exactmoe.kernels.cuda.source import THREADS, Pack, Variant
from exactmoe.ops import PACKED
from exactmoe.ops.cuda import experts
from exactmoe.plan.tiles import offered
from fake_launches import BLOCK, addresses, keep_launches, routes_of, weight

PROCESSORS = 132
A16, F32 = Numerics(), Numerics(slot="f32")


@pytest.fixture
def launched(monkeypatch):
    return keep_launches(monkeypatch)


def run_gate_up(pair, tokens=3, top_k=2, limit=None, packed=True):
    gate, slots = pair[0], tokens * top_k
    count = PACKED.rows_of_h(slots, gate.num_experts)
    scratch = torch.empty(count, gate.columns, dtype=torch.bfloat16) if packed else None
    x = torch.empty(tokens, gate.columns, dtype=torch.bfloat16)
    h = torch.empty(count, gate.rows, dtype=torch.bfloat16)
    routes = routes_of(slots, gate.num_experts)
    experts.gate_up(Rows(x, None, scratch), pair, routes, limit, h)
    return x, scratch, h, routes


def run_down(down, slots=6, numerics=A16, early=False):
    h = torch.empty(PACKED.rows_of_h(slots, down.num_experts), down.columns, dtype=torch.bfloat16)
    out = torch.empty(slots, down.rows, dtype=torch.bfloat16)
    routes = routes_of(slots, down.num_experts)
    experts.down(Rows(h, None), down, routes, numerics, out, early)
    return h, out, routes


@pytest.mark.parametrize("format", BLOCK)
def test_gate_up_of_few_tokens(launched, format):
    gate, up = weight(format), weight(format)
    x, _, h, routes = run_gate_up((gate, up), limit=1.5)
    (one,) = launched
    assert one.what == Variant("gate_up", format, 8, gather=True)
    assert one.early
    assert one.arguments == {
        **addresses("first", gate),
        **addresses("second", up),
        "offsets": routes.offsets.data_ptr(),
        "slots": routes.slots.data_ptr(),
        "x": x.data_ptr(),
        "out": h.data_ptr(),
        "num_experts": 4,
        "k": 384,
        "panels": 2,
        "top_k": 2,
        "divide": 0,
        "limit": 1.5,
    }


def test_gate_up_of_many_tokens_packs_them_first(launched):
    gate, up = weight(), weight()
    x, scratch, h, routes = run_gate_up((gate, up), tokens=300, top_k=3)
    pack, one = launched
    assert pack.what == Pack() and pack.early
    assert pack.grid == (4, 8, 256)
    assert pack.arguments == {
        "offsets": routes.offsets.data_ptr(),
        "slots": routes.slots.data_ptr(),
        "x": x.data_ptr(),
        "packed": scratch.data_ptr(),
        "k": 384,
        "top_k": 3,
    }
    assert one.what == Variant("gate_up", "nvfp4", 128) and one.early
    assert one.arguments["x"] == scratch.data_ptr() and one.arguments["out"] == h.data_ptr()
    assert one.arguments["top_k"] == 3 and one.arguments["limit"] == inf


def test_wide_tiles_need_scratch(launched):
    with pytest.raises(Unsupported, match="wider than 16 tokens needs scratch for packed rows"):
        run_gate_up((weight(), weight()), tokens=300, packed=False)
    assert launched == []
    run_gate_up((weight(), weight()), packed=False)
    assert len(launched) == 1


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("numerics", [A16, F32], ids=["bf16", "f32"])
def test_down(launched, numerics, early):
    down = weight("mxfp4", rows=384, columns=256)
    h, out, routes = run_down(down, numerics=numerics, early=early)
    (one,) = launched
    assert one.what == Variant("down", "mxfp4", 8, slot_f32=numerics is F32)
    assert one.early == early
    assert one.arguments == {
        **addresses("first", down),
        **addresses("second", down),
        "offsets": routes.offsets.data_ptr(),
        "slots": routes.slots.data_ptr(),
        "x": h.data_ptr(),
        "out": out.data_ptr(),
        "num_experts": 4,
        "k": 256,
        "panels": 3,
        "top_k": 1,
        "divide": 0,
        "limit": inf,
    }


def test_each_projection_may_divide(launched):
    for gate in (False, True):
        for up in (False, True):
            run_gate_up((weight(divide=gate), weight(divide=up)))
            assert launched[-1].arguments["divide"] == gate + 2 * up
        run_down(weight(divide=gate))
        assert launched[-1].arguments["divide"] == gate


def test_stacked_projections_are_read_where_they_lie(launched):
    """gate and up of each expert one after the other, as a checkpoint may hold them."""
    codes = torch.empty(4, 512, 192, dtype=torch.uint8)
    scales = torch.empty(4, 512, 24, dtype=torch.uint8)
    gate, up = (
        replace(weight(), codes=codes[:, part], scales=scales[:, part])
        for part in (slice(256), slice(256, 512))
    )
    run_gate_up((gate, up))
    found = launched[-1].arguments
    assert found["first_code_stride"] == found["second_code_stride"] == 512 * 192
    assert found["first_scale_stride"] == found["second_scale_stride"] == 512 * 24
    assert found["second_codes"] == found["first_codes"] + 256 * 192
    assert found["second_scales"] == found["first_scales"] + 256 * 24


def test_no_slots_launch_nothing(launched):
    run_gate_up((weight(), weight()), tokens=0)
    run_gate_up((weight(), weight()), tokens=3, top_k=0, packed=False)
    run_down(weight(), slots=0)
    assert launched == []


@pytest.mark.parametrize("op", ["gate_up", "down"])
@pytest.mark.parametrize("num_experts", [1, 5, 256])
@pytest.mark.parametrize("tokens", [1, 40, 700])
def test_a_block_for_each_item_up_to_one_a_processor(
    launched, op, num_experts, tokens, rng, monkeypatch
):
    """Items of any routing: tiles of each expert, times pairs of panels (gate and up, or two of
    down).
    """
    slots, rows = 3 * tokens, 640  # five panels

    def run():
        if op == "down":
            run_down(weight(num_experts=num_experts, rows=rows), slots=slots)
        else:
            pair = weight(num_experts=num_experts, rows=rows), weight(num_experts=num_experts)
            run_gate_up(pair, tokens, 3)
        return launched[-1]

    one = run()
    blocks = 5 if op == "gate_up" else 3
    ids = torch.randint(0, num_experts, (slots,), generator=rng)
    spread, together = ids.bincount(minlength=num_experts), torch.tensor([slots])
    for counts in (spread, together):
        assert one.grid[0] >= int(sum(ceil(n / one.what.tokens) for n in counts.tolist())) * blocks
    assert one.grid[0] <= slots * blocks
    assert one.grid[1:] == (1, THREADS)
    monkeypatch.setattr(experts, "processors", lambda device: PROCESSORS)
    assert run().grid[0] == min(PROCESSORS, one.grid[0])


def test_every_tile_launches_a_variant_whose_code_is_tested(launched, monkeypatch):
    """tests/kernels/cuda compiles `variants()`; no other is launched."""
    for width in offered("cuda"):
        monkeypatch.setenv("EXACTMOE_TILE", str(width))
        for slots in (4, 800):  # of 256 experts: few and many in use
            for format in BLOCK:
                small = {"format": format, "num_experts": 256, "rows": 128, "columns": 128}
                run_gate_up((weight(**small), weight(**small)), slots // 2, 2)
                for numerics in (A16, F32):
                    run_down(weight(**small), slots, numerics)
    assert {one.what for one in launched} - {Pack()} == set(variants())
