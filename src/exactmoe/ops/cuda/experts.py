"""gate_up and down on sm_90: which kernel, how many blocks, which arguments."""

from dataclasses import dataclass

from torch import Tensor

from exactmoe.config import Numerics
from exactmoe.errors import Unsupported
from exactmoe.formats.rows import Rows
from exactmoe.kernels.cuda.compile import kernel
from exactmoe.kernels.cuda.source import (
    PANEL,
    THREADS,
    WIDEST_GATHER,
    Pack,
    Variant,
)
from exactmoe.ops.cuda.arguments import Arguments, projection, token_rows, wide_of
from exactmoe.ops.cuda.counters import counters
from exactmoe.ops.cuda.launch import numbers, pointers, processors, queue
from exactmoe.ops.cuda.prepare import CudaWeight
from exactmoe.plan.tiles import WIDEST_ON_BF16, tile
from exactmoe.runtime.routes import RouteTable

_NO_CLAMP = float("inf")
_ARCHITECTURE = "sm_90"
# Blocks that pack the rows of one expert.
_PACKERS, _PACK_THREADS = 8, 256
# Phases of a launch, as kernels/cuda/experts.cuh numbers them.
_GATE_UP, _DOWN = 1, 2


@dataclass(frozen=True, eq=False)
class Experts:
    """The routed experts of a call, for one launch or two.

    Attributes:
        weights: gate, up and down; None: of a phase that is not launched.
        routes: of the call.
        swiglu_limit: the clamp of gate and up.
        numerics: class, and type of the slots.
        routing: routing weights float32 [T, K], class `a8`; None in `a16`.
    """

    weights: tuple[CudaWeight | None, CudaWeight | None, CudaWeight | None]
    routes: RouteTable
    swiglu_limit: float | None
    numerics: Numerics
    routing: Tensor | None = None

    @property
    def a8(self) -> bool:
        return self.numerics.activation == "a8"

    @property
    def given(self) -> tuple[CudaWeight, ...]:
        """The weights that are there."""
        return tuple(weight for weight in self.weights if weight is not None)

    @property
    def units(self) -> str:
        """Of all its weights."""
        units = {weight.units for weight in self.given}
        return units.pop() if len(units) == 1 else "both"

    @property
    def tokens(self) -> int:
        """Width of the tile. On the bf16 units the operands of a stage take too many registers for
        the widest of `a8`.
        """
        backend, op = "cuda_a8" if self.a8 else "cuda", "gate_up"
        num_slots = self.routes.slots.shape[0]
        tokens = tile(backend, _ARCHITECTURE, op, num_slots, self.given[0].num_experts).tokens
        return tokens if not self.a8 or self.units == "fp8" else min(tokens, WIDEST_ON_BF16)


def gate_up(experts: Experts, rows: Rows, h: Rows) -> None:
    """rows -> h, packed.

    Args:
        rows: `a16`: bf16 [T, H], with bf16 [packed, H] of scratch in `packed`. `a8`: e4m3 [T, H]
            with scales [T, H // 128]; `packed` is scratch as h.
        h: `a16`: bf16 [packed, I]. `a8`: quantised; e4m3 [packed, I] for experts whose down runs on
            the fp8 units, their values x 2^8 as bf16 in `packed` for the others, and scales
            [packed, I // 128].

    Packed: kernels/cuda/experts.cu; `Storage.rows_of_h` counts its rows.
    """
    _launch(experts, _GATE_UP, rows, h, None, True)


def down(experts: Experts, h: Rows, slots: Tensor, early: bool) -> None:
    """h of gate_up -> slots [S, H] at their places, bf16 or f32 as numerics.slot says.

    Args:
        early: the kernel before is gate_up with these routes, or came after it: it may still run
            when weights are first read.
    """
    _launch(experts, _DOWN, None, h, slots, early)


def gate_up_down(experts: Experts, rows: Rows, h: Rows, slots: Tensor) -> None:
    """Both in one launch."""
    _launch(experts, _GATE_UP + _DOWN, rows, h, slots, True)


def _launch(
    experts: Experts, phases: int, rows: Rows | None, h: Rows, slots: Tensor | None, early: bool
) -> None:
    num_slots = experts.routes.slots.shape[0]
    if num_slots == 0:
        return
    gate, _, down = experts.weights
    if gate is not None:
        hidden, inner = gate.columns, gate.rows
    else:
        assert down is not None
        hidden, inner = down.rows, down.columns
    tokens, units = experts.tokens, experts.units
    gather = tokens <= WIDEST_GATHER and (not experts.a8 or units == "fp8")
    top_k, x = 1, None
    if rows is not None:
        top_k = num_slots // rows.values.shape[0]
        x = rows if gather else _packed(experts, rows, hidden, top_k)
    activation = experts.numerics.activation
    slot_f32 = experts.numerics.slot == "f32"
    first = experts.given[0]
    variant = Variant(first.format, tokens, gather, slot_f32, activation, units)
    divide = sum(
        int(weight.divide) << bit
        for bit, weight in enumerate(experts.weights)
        if weight is not None
    )
    limit = _NO_CLAMP if experts.swiglu_limit is None else experts.swiglu_limit
    on = experts.routes.slots
    arguments = Arguments(
        *(projection(weight) for weight in experts.weights),
        *_addresses(experts.routes.offsets, experts.routes.slots),
        token_rows(x),
        token_rows(h),
        *_addresses(slots, experts.routing, counters(on.device)),
        *(first.num_experts, hidden, inner, top_k, phases, divide),
        limit,
    )
    tiles = min(num_slots, num_slots // tokens + first.num_experts)
    blocks = inner // PANEL if phases & _GATE_UP else 0
    blocks += -(-hidden // (2 * PANEL)) if phases & _DOWN else 0
    grid = (min(processors(on.device.index), tiles * blocks), 1, THREADS)
    queue(kernel(variant), on, grid, [arguments], early)


def _addresses(*tensors: Tensor | None) -> list[int]:
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def _packed(experts: Experts, rows: Rows, hidden: int, top_k: int) -> Rows:
    """The rows of x in packed order, in the call's scratch."""
    packed, routes = rows.packed, experts.routes
    first = experts.given[0]
    grid = (first.num_experts, min(_PACKERS, routes.slots.shape[0]), _PACK_THREADS)
    arguments = pointers(routes.offsets, routes.slots, rows.values)
    if not experts.a8:
        if not isinstance(packed, Tensor):
            raise Unsupported(
                f"a tile wider than {WIDEST_GATHER} tokens needs scratch for packed rows"
            )
        arguments += [*pointers(packed), *numbers(hidden, top_k)]
        queue(kernel(Pack()), packed, grid, arguments, True)
        return Rows(packed, None)
    if not isinstance(packed, Rows):
        raise Unsupported("packed rows of class a8 need scratch for them")
    gate, up, _ = experts.weights
    assert gate is not None and up is not None
    arguments += pointers(rows.scales, packed.values, wide_of(packed), packed.scales)
    arguments += [*pointers(gate.on_fp8, up.on_fp8), *numbers(hidden, top_k)]
    units = gate.units if gate.units == up.units else "both"
    queue(kernel(Pack("a8", units)), rows.values, grid, arguments, True)
    return packed
