"""Small kernels that start early: what the kernel before writes late they read, and what it reads
late they have not overwritten. Each kernel follows one that lets it start at once and then is slow.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from exactmoe.config import Numerics, RouterConfig
from exactmoe.formats.rows import Rows
from exactmoe.kernels.triton.finish import finish as finish_kernel
from exactmoe.ops.triton.combine import combine
from exactmoe.ops.triton.early import early
from exactmoe.ops.triton.finish import finish
from exactmoe.ops.triton.quantize import quantize
from exactmoe.ops.triton.route_table import route_table
from exactmoe.ops.triton.router import router
from exactmoe.runtime.routes import RouteTable
from gpu_layers import generator
from layers import assert_same_bits
from router_tensors import RouterTensors

pytestmark = pytest.mark.gpu
DELAY = 1_000_000  # ns: longer than the host needs for the next launch
_E, _H, _K = 288, 1024, 8


@triton.jit
def copy_late(source, target, count, delay, BLOCK: tl.constexpr):
    """int32 words [count], by one program: it lets the next kernel start, then waits `delay` ns."""
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    start = tl.extra.cuda.globaltimer()
    now = start
    while now - start < delay:
        now = tl.extra.cuda.globaltimer()
    for first in range(0, count, BLOCK):
        place = first + tl.arange(0, BLOCK)
        values = tl.load(source + place, mask=place < count, other=0)
        tl.store(target + place, values, mask=place < count)


def late(source: Tensor, target: Tensor) -> None:
    """Copies source over target, late."""
    words = [tensor.view(-1).view(torch.int32) for tensor in (source, target)]
    copy_late[(1,)](*words, words[0].numel(), DELAY, BLOCK=4096)


@dataclass(frozen=True)
class Case:
    """One op: tensors that it reads and writes, by name, and its launch."""

    reads: dict[str, Tensor]
    writes: dict[str, Tensor]
    run: Callable[[], object]


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def _routed(rng: torch.Generator, tokens: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, _E, (tokens, _K), generator=rng, device="cuda", dtype=torch.int32)
    return ids, torch.rand(tokens, _K, generator=rng, device="cuda")


def _finish(rng: torch.Generator, tokens: int) -> Case:
    dense, y = torch.randn(tokens, _H, generator=rng, device="cuda"), _empty(tokens, _H)
    return Case({"dense": dense}, {"y": y}, lambda: finish(dense, y))


def _quantize(rng: torch.Generator, tokens: int) -> Case:
    x = torch.randn(tokens, _H, generator=rng, device="cuda").bfloat16()
    out = Rows(_empty(tokens, _H, dtype=torch.float8_e4m3fn), _empty(tokens, _H // 128))
    return Case({"x": x}, {"codes": out.values, "scales": out.scales}, lambda: quantize(x, out))


def _route_table(rng: torch.Generator, tokens: int) -> Case:
    ids, _ = _routed(rng, tokens)
    offsets, slots = _empty(_E + 1, dtype=torch.int32), _empty(tokens * _K, dtype=torch.int32)
    routes = RouteTable(offsets, slots, torch.zeros(1, dtype=torch.int64, device="cuda"))
    writes = {"offsets": offsets, "slots": slots}
    return Case({"ids": ids}, writes, lambda: route_table(ids, _E, routes))


def _combine(rng: torch.Generator, tokens: int, shared: bool) -> Case:
    ids, weights = _routed(rng, tokens)
    slots = torch.randn(tokens * _K, _H, generator=rng, device="cuda").bfloat16()
    dense = torch.randn(tokens, _H, generator=rng, device="cuda") if shared else None
    y = _empty(tokens, _H, dtype=torch.bfloat16)
    reads = {"slots": slots, "ids": ids, "weights": weights}
    reads |= {} if dense is None else {"dense": dense}
    return Case(reads, {"y": y}, lambda: combine(slots, (ids, weights), _E, Numerics(), dense, y))


def _router(rng: torch.Generator, tokens: int, hashed: bool, dtype: torch.dtype) -> Case:
    x = torch.randn(tokens, _H, generator=rng, device="cuda").bfloat16()
    weight = (torch.randn(_E, _H, generator=rng, device="cuda") / 32).to(dtype)
    bias = torch.randn(_E, generator=rng, device="cuda")
    table = torch.randint(0, _E, (50, _K), generator=rng, device="cuda")
    token_ids = torch.randint(1, 50, (tokens,), generator=rng, device="cuda")
    config = RouterConfig(score="sigmoid", factor=2.5)
    weights = RouterTensors(weight, None if hashed else bias, table if hashed else None, config)
    ids, chosen = _empty(tokens, _K, dtype=torch.int32), _empty(tokens, _K)
    logits, parts = _empty(tokens, _E), _empty(16, tokens, _E) if tokens <= 64 else None
    given = token_ids if hashed else None
    reads = {"x": x, "weight": weight}
    reads |= {"table": table, "token_ids": token_ids} if hashed else {"bias": bias}
    return Case(
        reads,
        {"ids": ids, "weights": chosen, "logits": logits},
        lambda: router(x, weights, given, Numerics(), logits, (ids, chosen), parts),
    )


CASES = {
    "finish": _finish,
    "quantize": _quantize,
    "route_table": _route_table,
    "combine": lambda rng, tokens: _combine(rng, tokens, False),
    "combine with a shared expert": lambda rng, tokens: _combine(rng, tokens, True),
    "router": lambda rng, tokens: _router(rng, tokens, False, torch.bfloat16),
    "router, hashed": lambda rng, tokens: _router(rng, tokens, True, torch.bfloat16),
    "router, float32": lambda rng, tokens: _router(rng, tokens, False, torch.float32),
}


@pytest.fixture
def starts_early() -> None:
    if "launch_pdl" not in early(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("no kernel of this card starts early")


@pytest.fixture(params=[(name, tokens) for name in CASES for tokens in (1, 100)], ids=str)
def case(request, starts_early) -> Case:
    name, tokens = request.param
    return CASES[name](generator("cuda", tokens), tokens)


def results(case: Case) -> dict[str, Tensor]:
    torch.cuda.synchronize()
    return {name: tensor.clone() for name, tensor in case.writes.items()}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, tensor in expected.items():
        assert_same_bits(found[name].view(torch.uint8), tensor.view(torch.uint8))


def captured(work: Callable[[], None]) -> Callable[[], None]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    return graph.replay


@pytest.mark.parametrize("in_graph", [False, True])
def test_what_is_written_late_is_read(case, in_graph):
    """Also by the second kernel of a router: the end of its first means the end of all before."""
    case.run()
    expected = results(case)
    for tensor in case.reads.values():
        final = tensor.clone()

        def work(final: Tensor = final, tensor: Tensor = tensor) -> None:
            late(final, tensor)
            case.run()

        run = captured(work) if in_graph else work
        for _ in range(3):
            tensor.zero_()
            for out in case.writes.values():
                out.view(torch.uint8).fill_(0x55)
            torch.cuda.synchronize()
            run()
            same(results(case), expected)


@pytest.mark.parametrize("in_graph", [False, True])
def test_what_is_read_late_is_not_yet_overwritten(case, in_graph):
    case.run()
    for out in case.writes.values():
        kept = torch.empty_like(out)

        def work(out: Tensor = out, kept: Tensor = kept) -> None:
            late(out, kept)
            case.run()

        run = captured(work) if in_graph else work
        for byte in (0x11, 0x22):
            out.view(torch.uint8).fill_(byte)
            torch.cuda.synchronize()
            run()
            torch.cuda.synchronize()
            assert kept.view(torch.uint8).unique().tolist() == [byte]


def test_a_kernel_that_does_not_wait_is_caught(starts_early):
    """The trap works: started early without its wait, finish reads what is not yet written."""
    dense = torch.ones(1, _H, device="cuda")
    y, final = torch.zeros_like(dense), torch.full_like(dense, 2.0)
    for _ in range(2):  # the first one compiles
        dense.fill_(1.0)
        torch.cuda.synchronize()
        late(final, dense)
        finish_kernel[(1,)](
            dense,
            y,
            _H,
            BLOCK=1024,
            num_warps=4,
            enable_fp_fusion=False,
            PDL=False,
            launch_pdl=True,
        )
        torch.cuda.synchronize()
    assert y.unique().tolist() == [1.0]
