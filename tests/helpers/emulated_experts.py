"""Small problems of the routed experts, run by the emulator from x to the slots."""

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from emulate import ALL
from emulated_launches import Launches, emulated
from exactmoe import Numerics, PackedWeight, env, reference
from exactmoe.formats import fp8_exact
from exactmoe.formats.fragment import to_fragment
from exactmoe.formats.rows import Rows
from exactmoe.ops.cuda import experts
from exactmoe.ops.cuda.prepare import CudaWeight, prepare
from exactmoe.runtime.routes import RouteTable
from gpu_layers import generator, packed

INNER, TOP_K = 384, 2
BUSY = 1  # the expert that takes a slot of every token
LIMIT = 10.0
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Problem:
    """Weights and a call; odd experts but BUSY have no slot, and BUSY has one of each token.

    Attributes:
        format: "nvfp4", "nvfp4-divide" (by the global scale) or "mxfp4"; or of gate, up and down.
        activation: "a16" or "a8".
        units: of the experts: "bf16", "fp8" or "both".
        hidden: size of x, a multiple of 128.
        experts: how many there are.
        slot: type of the slots, "bf16" or "f32"; "f32" in a8.
        largest: feature 0 of x is about the largest bf16 in three tokens, and meets zero codes.
    """

    format: str
    activation: str = "a16"
    units: str = "bf16"
    hidden: int = 256
    experts: int = 5
    slot: str = "bf16"
    largest: bool = False

    @property
    def numerics(self) -> Numerics:
        if self.activation == "a16":
            return Numerics(slot=self.slot)
        return Numerics(activation="a8", slot="f32", output="f32")


@dataclass(frozen=True)
class Run:
    """How a problem is run.

    Attributes:
        tile: token width.
        tokens: the first so many of the call.
        blocks: most blocks of a grid.
        seed: of the order.
        stages: of the ring; 0: as many as fit.
        way: "one": gate_up and down in one launch; "two": in two; "each": an expert at a time, both
            in one, as EXACTMOE_HOST_LOOP has it.
        together: blocks that live at the same time.
        absent: no expert of the call is here, as on a card whose experts no token wants.
    """

    tile: int
    tokens: int
    blocks: int = 3
    seed: int = 0
    stages: int = 0
    way: str = "one"
    together: int = ALL
    absent: bool = False


MOST = 136


@cache
def weights_of(problem: Problem) -> tuple[PackedWeight, PackedWeight, PackedWeight]:
    """Gate, up and down in the checkpoint's order."""
    rng = generator("cpu", 5)
    hidden = problem.hidden
    sizes = (INNER, hidden), (INNER, hidden), (hidden, INNER)
    gate, up, down = (_weight(rng, problem, i, *size) for i, size in enumerate(sizes))
    if problem.largest:
        for weight in (gate, up):
            weight.codes[:, :, 0] &= 0xF0
    return gate, up, down


def _weight(
    rng: torch.Generator, problem: Problem, number: int, rows: int, columns: int
) -> PackedWeight:
    """Of gate, up and down the one of that number. Of units "both", every third expert from
    `number` on is not exact on the fp8 units.
    """
    formats = problem.format.split()
    format = formats[number % len(formats)]
    made = packed(rng, format, problem.experts, rows, columns)
    if problem.units == "bf16" or made.scales is None:
        return made
    scales = made.scales
    if made.format == "nvfp4":
        scales = (torch.randint(4, 12, scales.shape, generator=rng) << 3).byte()
    if problem.units == "both":
        for expert in range(number, problem.experts, 3):
            scales[expert, 0, :2] = torch.tensor(
                [0x08, 0x78] if made.global_scale is not None else [100, 120]
            ).byte()
            scales[expert, 1, 1] += 1
    return replace(made, scales=scales)


@cache
def prepared(problem: Problem) -> tuple[CudaWeight, CudaWeight, CudaWeight]:
    """The same as the kernels read them."""
    found = []
    for weight in copy.deepcopy(weights_of(problem)):
        exact = fp8_exact(weight) if problem.units != "bf16" else None
        to_fragment(weight, exact)
        found.append(prepare(weight, exact))
    gate, up, down = found
    return gate, up, down


@cache
def call(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """x bfloat16 [MOST, hidden], ids int32 [MOST, TOP_K], weights float32."""
    rng = generator("cpu", 6)
    x = torch.randn(MOST, problem.hidden, generator=rng).bfloat16()
    if problem.largest:
        x[:3, 0] = 3.3e38
    ids = 2 * torch.randint(0, (problem.experts + 1) // 2, (MOST,), generator=rng)
    ids = torch.stack((ids, torch.full_like(ids, BUSY)), 1).int()
    return x, ids, torch.rand(MOST, TOP_K, generator=rng) + 0.1


@cache
def expected(problem: Problem) -> Tensor:
    """Slots float32 [MOST * TOP_K, hidden] of the reference, all rows of an expert at a time."""
    (gate, up, down), of = weights_of(problem), problem.numerics
    x, ids, weights = call(problem)
    slots = torch.full((MOST * TOP_K, problem.hidden), float("nan"))
    for expert in range(problem.experts):
        places = (ids.flatten() == expert).nonzero()[:, 0]
        if len(places):
            rows = reference.as_rows(x[places // TOP_K], of)
            routing = weights.flatten()[places] if problem.activation == "a8" else None
            h = reference.gate_up(rows, gate, up, expert, LIMIT, routing)
            slots[places] = reference.down(reference.as_rows(h, of), down, expert, of)
    return slots


def routes_of(ids: Tensor, num_experts: int) -> RouteTable:
    experts_of_slots = ids.flatten().long()
    offsets = torch.zeros(num_experts + 1, dtype=torch.int32)
    offsets[1:] = torch.bincount(experts_of_slots, minlength=num_experts).cumsum(0)
    slots = experts_of_slots.sort(stable=True).indices.int()
    return RouteTable(offsets, slots, torch.zeros(1, dtype=torch.int64))


def poison(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """All bytes 0xFF: NaN in every type here."""
    size = torch.empty(0, dtype=dtype).element_size()
    return torch.full((rows, columns * size), 0xFF, dtype=torch.uint8).view(dtype)


def slots_of(problem: Problem, run: Run, change: Callable[[str], str] | None = None) -> Tensor:
    """Slots [tokens * TOP_K, hidden] of gate_up and down, as a card's launches would give them; all
    bytes 0xFF where none is written.

    Args:
        change: of the kernels' texts.
    """
    x, ids, weights = (tensor[: run.tokens].contiguous() for tensor in call(problem))
    routes, wide = routes_of(ids, problem.experts), problem.numerics.slot == "f32"
    if run.absent:
        routes.offsets.zero_()
    slots = poison(run.tokens * TOP_K, problem.hidden, torch.float32 if wide else torch.bfloat16)

    def text_of(text: str) -> str:
        if run.stages:
            text = re.sub(r"(?m)^#define STAGES \d+$", f"#define STAGES {run.stages}", text)
        return text if change is None else change(text)

    with emulated() as launches, env.forced("EXACTMOE_TILE", str(run.tile)):
        launches.blocks, launches.seed, launches.change = run.blocks, run.seed, text_of
        launches.together = run.together
        for name, weight in zip(("gate", "up", "down"), prepared(problem), strict=True):
            launches.weight(name, weight)
        launches.reads |= {"offsets": routes.offsets, "routed": routes.slots}
        launches.writes["slots"] = slots
        rows, h, routing = _arrays(launches, problem, x, weights)
        for table in _tables(routes, run.way):
            launches.reads["offsets"] = table.offsets
            _launch(problem, run.way, table, routing, (rows, h, slots))
    return slots


def _tables(routes: RouteTable, way: str) -> list[RouteTable]:
    if way != "each":
        return [routes]
    bounds = routes.offsets.tolist()
    pairs = [(low, high) for low, high in zip(bounds, bounds[1:], strict=False) if high > low]
    return [RouteTable(routes.offsets.clamp(*pair), routes.slots, routes.fault) for pair in pairs]


def _launch(
    problem: Problem,
    way: str,
    routes: RouteTable,
    routing: Tensor | None,
    arrays: tuple[Rows, Rows, Tensor],
) -> None:
    (gate, up, down), (rows, h, slots) = prepared(problem), arrays
    both, numerics = experts.Experts((gate, up, down), routes, LIMIT, problem.numerics), Numerics()
    if problem.activation == "a8":
        both, numerics = replace(both, routing=routing), problem.numerics
    if way != "two":
        experts.gate_up_down(both, rows, h, slots)
        return
    # As ops/cuda_path.py: of a16, gate_up knows neither down nor the type of the slots.
    first = both if problem.activation == "a8" else replace(both, weights=(gate, up, None))
    experts.gate_up(replace(first, numerics=numerics), rows, h)
    experts.down(replace(both, weights=(None, None, down)), h, slots, True)


def _arrays(
    launches: Launches, problem: Problem, x: Tensor, weights: Tensor
) -> tuple[Rows, Rows, Tensor | None]:
    """Token rows with scratch, h, and routing weights."""
    count, hidden = 8 * (len(x) * TOP_K // 8 + problem.experts), problem.hidden
    if problem.activation == "a16":
        h, scratch = poison(count, INNER, x.dtype), poison(count, hidden, x.dtype)
        launches.reads["x"] = x
        launches.writes |= {"h": h, "packed x": scratch}
        return Rows(x, None, scratch), Rows(h, None), None
    codes, scales = reference.quantize(x)
    packed_x, packed_h = (_packed_rows(count, columns) for columns in (hidden, INNER))
    launches.reads |= {"x": codes, "x scales": scales, "routing": weights}
    for name, packed_rows in (("packed x", packed_x), ("h", packed_h)):
        launches.writes[name] = packed_rows.values
        launches.writes[f"{name} scales"] = packed_rows.scales
        launches.writes[f"wide {name}"] = packed_rows.packed
    return Rows(codes.view(E4M3), scales, packed_x), packed_h, weights


def _packed_rows(rows: int, columns: int) -> Rows:
    return Rows(
        poison(rows, columns, E4M3),
        poison(rows, columns // 128, torch.float32),
        poison(rows, columns, torch.bfloat16),
    )
