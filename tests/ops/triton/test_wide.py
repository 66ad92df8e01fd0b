"""The small ops at the sizes of real layers, against the CPU path, whose bytes are the reference's;
and what only a card can show: one bit pattern at every width of the router, and capture.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from exactmoe import ops
from exactmoe.config import Numerics, RouterConfig
from exactmoe.formats.rows import Rows
from exactmoe.ops.triton.combine import combine
from exactmoe.ops.triton.finish import finish
from exactmoe.ops.triton.quantize import quantize
from exactmoe.ops.triton.route_table import route_table
from exactmoe.ops.triton.router import router, router_logits, select
from exactmoe.runtime.routes import RouteTable
from layers import assert_same_bits
from router_tensors import RouterTensors

pytestmark = pytest.mark.gpu
EXPERTS, HIDDEN, TOP_K = 288, 4096, 8
CONFIG = RouterConfig(score="sqrt_softplus", factor=1.5)


def call_of(rng: torch.Generator, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Slots bfloat16 [S, H], ids with absent ones int32 [T, K], weights float32 [T, K]."""
    slots = torch.randn(tokens * TOP_K, HIDDEN, generator=rng).bfloat16()
    ids = torch.randint(-1, EXPERTS + 1, (tokens, TOP_K), generator=rng).int()
    return slots, ids, torch.randn(tokens, TOP_K, generator=rng)


def narrow_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Logits of at most 64 tokens, through the segments' sums."""
    logits = torch.empty(len(x), len(weight), device="cuda")
    routed = torch.empty(len(x), 1, dtype=torch.int32, device="cuda"), logits[:, :1].clone()
    parts = torch.empty(16, *logits.shape, device="cuda")
    weights = RouterTensors(weight, None, None, CONFIG)
    router(x, weights, None, Numerics(), logits, routed, parts)
    return logits


@pytest.mark.parametrize("hidden", [96, 256, 2064, 4096, 6144])
def test_logits_have_one_bit_pattern_at_every_width(hidden, rng):
    x = torch.randn(1300, hidden, generator=rng).bfloat16().cuda()
    weight = torch.randn(EXPERTS, hidden, generator=rng).bfloat16().cuda()
    expected = torch.cat([narrow_logits(row[None], weight) for row in x[:300]])
    for width in (2, 15, 16, 17, 33, 64):
        assert_same_bits(narrow_logits(x[:width], weight), expected[:width], str(width))
    for width in (1, 65, 128, 300, 1300):
        logits = torch.full((width, EXPERTS), float("nan"), device="cuda")
        router_logits(x[:width], weight, logits, None)
        assert_same_bits(logits[:300], expected[:width], str(width))
    truth = x[:300].double() @ weight.double().T
    assert (expected - truth).norm() <= 2.0**-17 * truth.norm()


def test_logits_of_neighbours_stay_apart(rng):
    x = torch.randn(64, HIDDEN, generator=rng).bfloat16().cuda()
    weight = torch.randn(EXPERTS, HIDDEN, generator=rng).bfloat16().cuda()
    clean = narrow_logits(x, weight)
    x[7], x[9, 100] = float("nan"), float("inf")
    others = [t for t in range(64) if t not in (7, 9)]
    assert_same_bits(narrow_logits(x, weight)[others], clean[others])


@pytest.mark.parametrize("ladder", ["f32", "bf16_ladder"])
@pytest.mark.parametrize("score", ["sigmoid", "sqrt_softplus"])
def test_select(score, ladder, rng):
    weight = torch.randn(EXPERTS, 16, generator=rng).bfloat16()
    bias = torch.randn(EXPERTS, generator=rng) * 0.1
    weights = RouterTensors(weight, bias, None, RouterConfig(score, 2.5))
    x = torch.randn(4096, 16, generator=rng).bfloat16().float()
    logits, numerics = torch.empty(4096, EXPERTS), Numerics(router=ladder)
    expected = torch.empty(4096, TOP_K, dtype=torch.int32), torch.empty(4096, TOP_K)
    ops.path("cpu").router(x, weights, None, numerics, logits, expected, None)
    found = torch.empty_like(expected[0], device="cuda"), torch.empty_like(expected[1]).cuda()
    select(logits.cuda(), weights.on("cuda"), None, numerics, found)
    assert_same_bits(found[0].cpu(), expected[0])
    assert_same_bits(found[1].cpu(), expected[1])


@pytest.mark.parametrize(("experts", "tokens"), [(288, 1), (288, 64), (288, 1024), (1024, 8192)])
def test_route_table(experts, tokens, rng):
    ids = torch.randint(-1, experts + 1, (tokens, TOP_K), generator=rng).int()
    tables = []
    for name, device, kind in (("cpu", "cpu", torch.int64), ("triton", "cuda", torch.int32)):
        routes = RouteTable(
            torch.empty(experts + 1, dtype=kind, device=device),
            torch.empty(ids.numel(), dtype=kind, device=device),
            torch.zeros(1, dtype=torch.int64, device=device),
        )
        launcher = route_table if name == "triton" else ops.path(name).route_table
        launcher(ids.to(device), experts, routes)
        tables.append(routes)
    expected, found = tables
    present = int(expected.offsets[-1])
    assert_same_bits(found.offsets.cpu().long(), expected.offsets)
    assert_same_bits(found.slots[:present].cpu().long(), expected.slots[:present])
    assert_same_bits(found.fault.cpu(), expected.fault)


@pytest.mark.parametrize("activation", ["a16", "a8"])
@pytest.mark.parametrize("shared", [True, False])
def test_combine(activation, shared, rng):
    numerics = Numerics.preset(activation)
    slots, ids, weights = call_of(rng, 512)
    slots = slots if numerics.slot == "bf16" else slots.float()
    row = torch.randn(512, HIDDEN, generator=rng) if shared else None
    expected = torch.empty(512, HIDDEN).bfloat16()
    ops.path("cpu").combine(slots.float(), (ids, weights), EXPERTS, numerics, row, expected)
    y = torch.empty(512, HIDDEN, dtype=torch.bfloat16, device="cuda")
    given = None if row is None else row.cuda()
    combine(slots.cuda(), (ids.cuda(), weights.cuda()), EXPERTS, numerics, given, y)
    assert_same_bits(y.cpu(), expected)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_quantize(kind, rng):
    bits = torch.randint(0, 2**32, (1024, HIDDEN), generator=rng, dtype=torch.int64).int()
    values = torch.cat([torch.randn(1024, HIDDEN, generator=rng), bits.view(torch.float32)])
    values = values.to(kind)
    expected = Rows(torch.empty(values.shape), torch.empty(len(values), HIDDEN // 128))
    ops.path("cpu").quantize(values.float(), expected)
    codes = torch.empty(values.shape, dtype=torch.float8_e4m3fn, device="cuda")
    found = quantize(values.cuda(), Rows(codes, torch.empty_like(expected.scales, device="cuda")))
    # As values: the one code of NaN and the one zero are checked in test_quantize.py.
    assert torch.equal(found.values.cpu().float().nan_to_num(1e9), expected.values.nan_to_num(1e9))
    assert_same_bits(found.scales.cpu(), expected.scales)


def small_ops(rng: torch.Generator) -> tuple[Callable[[], None], list[Tensor]]:
    """Every small op of a call of 8 tokens, and what they write."""
    x = torch.randn(8, HIDDEN, generator=rng).bfloat16().cuda()
    weight = torch.randn(EXPERTS, HIDDEN, generator=rng).bfloat16().cuda()
    weights = RouterTensors(weight, torch.randn(EXPERTS, generator=rng).cuda(), None, CONFIG)
    slots = torch.randn(8 * TOP_K, HIDDEN, generator=rng).bfloat16().cuda()
    logits, parts = torch.empty(8, EXPERTS).cuda(), torch.empty(16, 8, EXPERTS).cuda()
    routed = torch.empty(8, TOP_K, dtype=torch.int32).cuda(), torch.empty(8, TOP_K).cuda()
    index = [torch.empty(n, dtype=torch.int32).cuda() for n in (EXPERTS + 1, 8 * TOP_K)]
    routes = RouteTable(*index, torch.zeros(1, dtype=torch.int64).cuda())
    rows = Rows(torch.empty_like(x).to(torch.float8_e4m3fn), torch.empty(8, HIDDEN // 128).cuda())
    y, dense = torch.empty_like(x), torch.empty(8, HIDDEN).cuda()

    def run() -> None:
        router(x, weights, None, Numerics(), logits, routed, parts)
        route_table(routed[0], EXPERTS, routes)
        quantize(x, rows)
        combine(slots, routed, EXPERTS, Numerics(), None, dense)
        finish(dense, y)

    assert rows.scales is not None
    return run, [logits, *routed, *index, rows.values, rows.scales, dense, y]


def test_a_capture_of_all_ops_replays_the_same_bytes(rng):
    """A read of the device by the host would fail in a capture."""
    run, written = small_ops(rng)
    run()
    expected = [t.clone() for t in written]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for tensor in written:
        tensor.view(torch.uint8).fill_(0x55)
    graph.replay()
    for found, before in zip(written, expected, strict=True):
        assert_same_bits(found, before)
