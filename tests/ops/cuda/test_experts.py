"""What is launched for gate_up and down of class a16 on sm_90: kernels, grids and arguments."""

import ctypes
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
from exactmoe.ops.cuda.arguments import Arguments
from exactmoe.ops.cuda.experts import Experts
from exactmoe.plan.tiles import offered
from fake_launches import BLOCK, flat, keep_launches, members, routes_of, told, weight

PROCESSORS = 132
A16, F32 = Numerics(), Numerics(slot="f32")
GATE_UP, DOWN, BOTH = 1, 2, 3


@pytest.fixture
def launched(monkeypatch):
    return keep_launches(monkeypatch)


def x_of(gate, tokens, slots, packed=True):
    count = PACKED.rows_of_h(slots, gate.num_experts)
    scratch = torch.empty(count, gate.columns, dtype=torch.bfloat16) if packed else None
    return Rows(torch.empty(tokens, gate.columns, dtype=torch.bfloat16), None, scratch)


def h_of(columns, slots, num_experts):
    count = PACKED.rows_of_h(slots, num_experts)
    return Rows(torch.empty(count, columns, dtype=torch.bfloat16), None)


def run_gate_up(pair, tokens=3, top_k=2, limit=None, packed=True):
    gate, slots = pair[0], tokens * top_k
    x, h = x_of(gate, tokens, slots, packed), h_of(gate.rows, slots, gate.num_experts)
    routes = routes_of(slots, gate.num_experts)
    experts.gate_up(Experts((*pair, None), routes, limit, A16), x, h)
    return x, h, routes


def run_down(down, slots=6, numerics=A16, early=False):
    h, routes = h_of(down.columns, slots, down.num_experts), routes_of(slots, down.num_experts)
    out = torch.empty(slots, down.rows, dtype=torch.bfloat16)
    experts.down(Experts((None, None, down), routes, None, numerics), h, out, early)
    return h, out, routes


def run_both(weights, tokens=3, top_k=2, limit=None, numerics=A16):
    (gate, _, down), slots = weights, tokens * top_k
    x, h = x_of(gate, tokens, slots), h_of(gate.rows, slots, gate.num_experts)
    routes, out = routes_of(slots, gate.num_experts), torch.empty(slots, down.rows)
    experts.gate_up_down(Experts(weights, routes, limit, numerics), x, h, out)
    return x, h, out, routes


def layer_of(format="nvfp4", num_experts=4, hidden=384, inner=256):
    pair = (weight(format, num_experts, inner, hidden) for _ in range(2))
    return (*pair, weight(format, num_experts, hidden, inner))


def test_arguments_are_those_of_the_kernel():
    """Names, types and order of experts.cuh."""
    found = {name: kind for name, kind, _ in flat(Arguments())}
    assert list(found.items()) == list(members("Arguments").items())
    assert ctypes.sizeof(Arguments) % 8 == 0


@pytest.mark.parametrize("format", BLOCK)
def test_gate_up_of_few_tokens(launched, format):
    gate, up = weight(format), weight(format)
    x, h, routes = run_gate_up((gate, up), limit=1.5)
    (one,) = launched
    assert one.what == Variant(format, 8, gather=True)
    assert one.early
    sizes = {"num_experts": 4, "hidden": 384, "inner": 256, "top_k": 2}
    assert one.arguments == told(
        {"gate": gate, "up": up}, routes, x=x, h=h, phases=GATE_UP, limit=1.5, **sizes
    )


def test_gate_up_of_many_tokens_packs_them_first(launched):
    gate, up = weight(), weight()
    x, h, routes = run_gate_up((gate, up), tokens=300, top_k=3)
    pack, one = launched
    assert pack.what == Pack() and pack.early
    assert pack.grid == (4, 8, 256)
    assert pack.arguments == {
        "offsets": routes.offsets.data_ptr(),
        "slots": routes.slots.data_ptr(),
        "x": x.values.data_ptr(),
        "packed": x.packed.data_ptr(),
        "k": 384,
        "top_k": 3,
    }
    assert one.what == Variant("nvfp4", 128) and one.early
    assert one.arguments["x.values"] == x.packed.data_ptr()
    assert one.arguments["h.values"] == h.values.data_ptr()
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
    assert one.what == Variant("mxfp4", 8, gather=True, slot_f32=numerics is F32)
    assert one.early == early
    sizes = {"num_experts": 4, "hidden": 384, "inner": 256, "top_k": 1}
    assert one.arguments == told(
        {"down": down}, routes, h=h, out=out, phases=DOWN, limit=inf, **sizes
    )


@pytest.mark.parametrize("numerics", [A16, F32], ids=["bf16", "f32"])
def test_both_in_one(launched, numerics):
    weights = layer_of()
    x, h, out, routes = run_both(weights, limit=1.5, numerics=numerics)
    (one,) = launched
    assert one.what == Variant("nvfp4", 8, gather=True, slot_f32=numerics is F32)
    assert one.early
    named = dict(zip(("gate", "up", "down"), weights, strict=True))
    sizes = {"num_experts": 4, "hidden": 384, "inner": 256, "top_k": 2}
    assert one.arguments == told(named, routes, x=x, h=h, out=out, phases=BOTH, limit=1.5, **sizes)
    run_both(weights, tokens=300)
    assert [type(other.what) for other in launched[1:]] == [Pack, Variant]


def test_each_projection_may_divide(launched):
    def run(*divide):
        weights = [replace(w, divide=d) for w, d in zip(layer_of(), divide, strict=True)]
        run_both(tuple(weights))
        both = launched[-1].arguments["divide"]
        run_gate_up(weights[:2])
        first = launched[-1].arguments["divide"]
        run_down(weights[2])
        return both, first, launched[-1].arguments["divide"]

    assert run(True, False, False) == (1, 1, 0)
    assert run(False, True, False) == (2, 2, 0)
    assert run(False, False, True) == (4, 0, 4)
    assert run(True, True, True) == (7, 3, 4)


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
    assert found["gate.code_stride"] == found["up.code_stride"] == 512 * 192
    assert found["gate.scale_stride"] == found["up.scale_stride"] == 512 * 24
    assert found["up.codes"] == found["gate.codes"] + 256 * 192
    assert found["up.scales"] == found["gate.scales"] + 256 * 24


def test_no_slots_launch_nothing(launched):
    run_gate_up((weight(), weight()), tokens=0)
    run_gate_up((weight(), weight()), tokens=3, top_k=0, packed=False)
    run_down(weight(), slots=0)
    run_both(layer_of(), tokens=0)
    assert launched == []


@pytest.mark.parametrize("op", ["gate_up", "down", "both"])
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
        elif op == "both":
            run_both(layer_of(num_experts=num_experts, hidden=rows, inner=rows), tokens, 3)
        else:
            pair = weight(num_experts=num_experts, rows=rows), weight(num_experts=num_experts)
            run_gate_up(pair, tokens, 3)
        return launched[-1]

    one = run()
    blocks = {"gate_up": 5, "down": 3, "both": 8}[op]
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
                    run_both((weight(**small),) * 3, slots // 2, 2, numerics=numerics)
    assert {one.what for one in launched} - {Pack()} == set(variants())
