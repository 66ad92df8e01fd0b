"""Path: the ops that a layer calls, one set a backend. All paths of a device give the same bits."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from exactmoe.config import Numerics, RouterConfig
from exactmoe.formats import PackedWeight
from exactmoe.formats.rows import Rows
from exactmoe.ops.cards import CardOps
from exactmoe.runtime.routes import RouteTable

# FRAGMENT_FP8: experts that are exact on the fp8 units lie as these want them.
CANONICAL, FRAGMENT, FRAGMENT_FP8 = "canonical", "fragment", "fragment_fp8"


@dataclass(frozen=True)
class Storage:
    """The types that a path keeps its arrays in; a layer lays out the workspace by them.

    Attributes:
        x: rows of the call, as router, gate_up, dense_mlp and (`a8`) quantize read them.
        h: what gate_up writes in `a16`, and h of a dense MLP. In `a8` it is float32.
        index: offsets and sorted slots of the route table.
        codes: e4m3 values of `a8` rows, decoded or as codes.
        slots: outputs of the experts where numerics.slot is "bf16"; else float32.
        reads_given: x, expert ids int32 and weights are read where the caller has them when they
            are contiguous; else all of them are copied into the workspace.
        router_parts: the most tokens whose logits are summed in 16 separate segments, float32
            [16, T, E] of scratch; 0: the path needs none.
        layout: order of the bytes of routed experts, "canonical", "fragment" or "fragment_fp8"
            (formats/fragment.py, formats/fragment_fp8.py).
        packed: h of routed experts, and x for wide tiles, lie in eights of rows of one expert as
            the matrix units want them (kernels/cuda/experts.cu).
        one_launch: gate_up_down computes gate_up and down in one launch.
        units: of `a8` on a packed path, whose gate_up_quantized gives h quantised: "auto", "bf16"
            or "fp8" (Numerics.units); "" of all others.
    """

    x: torch.dtype
    h: torch.dtype
    index: torch.dtype
    codes: torch.dtype
    slots: torch.dtype
    reads_given: bool = False
    router_parts: int = 0
    layout: str = CANONICAL
    packed: bool = False
    one_launch: bool = False
    units: str = ""

    def rows_of_h(self, num_slots: int, num_experts: int) -> int:
        """Rows of h for S slots; when packed, each expert begins a new eight."""
        return 8 * (num_slots // 8 + num_experts) if self.packed else num_slots


# Values of bf16 and e4m3 held as float32: what the CPU multiplies.
DECODED = Storage(
    x=torch.float32,
    h=torch.float32,
    index=torch.int64,
    codes=torch.float32,
    slots=torch.float32,
)
# Values as the matrix units of a GPU take them.
DEVICE = Storage(
    x=torch.bfloat16,
    h=torch.bfloat16,
    index=torch.int32,
    codes=torch.float8_e4m3fn,
    slots=torch.bfloat16,
    reads_given=True,
    router_parts=64,
)
# As the fast path of sm_90 reads routed experts.
PACKED = replace(DEVICE, layout=FRAGMENT, packed=True, one_launch=True)
# The same in class a8, by Numerics.units.
PACKED_A8 = {
    "auto": replace(PACKED, layout=FRAGMENT_FP8, units="auto"),
    "bf16": replace(PACKED, units="bf16"),
    "fp8": replace(PACKED, layout=FRAGMENT_FP8, units="fp8"),
}


def gpu_storages(a8_units: str) -> tuple[Storage, ...]:
    """Of the paths that a layer with these `Numerics.a8_units` may take on sm_90."""
    return DEVICE, PACKED_A8[a8_units] if a8_units else PACKED


class ExpertSettings(NamedTuple):
    """Of a call's routed experts: the clamp of gate and up, the numerics, and the routing weights
    [T, K] that multiply h in `a8`, None in `a16`.
    """

    swiglu_limit: float | None
    numerics: Numerics
    routing: Tensor | None


class RouterWeights(Protocol):
    """What a router op reads: weight_f32 [E, H], and weight_bf16 if every value is exactly a bf16,
    else None; bias f32 [E] or None; table i64 [V, K] or None.
    """

    bias: Any
    table: Any
    config: RouterConfig

    @property
    def weight_f32(self) -> Tensor: ...

    @property
    def weight_bf16(self) -> Tensor | None: ...


class Path(Protocol):
    """One backend's ops. Shapes: T tokens, K slots a token, S = T x K, H hidden, I intermediate.
    Outputs are given. Types are those of `storage`; where float32 stands below, they are not.
    """

    name: str
    storage: Storage

    @property
    def cards(self) -> CardOps:
        """What several cards need beside it."""

    def prepare(self, weight: PackedWeight) -> Any:
        """What this path needs to read a packed weight; shares its memory.

        A path of fragment layout is given the bytes in fragment order.
        """

    def quantize(self, values: Tensor, out: Rows) -> Rows:
        """`a8` activations: x [T, K] of the storage's type, or h float32 [S, K] -> e4m3 values of
        `storage.codes` and float32 scales.
        """

    def router(
        self,
        x: Tensor,
        router: RouterWeights,
        token_ids: Tensor | None,
        numerics: Numerics,
        logits: Tensor,
        routed: tuple[Tensor, Tensor],
        parts: Tensor | None,
    ) -> None:
        """x [T, H] (values of bf16) -> logits float32 [T, E], and routed: expert_ids int32 [T, K]
        and weights float32 [T, K].

        token_ids int64 [T] of a hash layer. parts: scratch float32 [16, T, E] where T is at most
        `storage.router_parts`, else None.
        """

    def route_table(self, expert_ids: Tensor, num_experts: int, routes: RouteTable) -> None:
        """expert_ids int32 [T, K] -> slots sorted by expert."""

    def gate_up(
        self,
        rows: Rows,
        gate_up: tuple[Any, Any],
        routes: RouteTable,
        weights: Tensor | None,
        swiglu_limit: float | None,
        h: Tensor,
    ) -> None:
        """rows [T, H] -> h [S, I] at the slot's place; weights [T, K] multiply h in `a8`
        and are None in `a16`.
        """

    def gate_up_quantized(
        self,
        rows: Rows,
        weights: tuple[Any, Any, Any],
        routes: RouteTable,
        routing: Tensor,
        swiglu_limit: float | None,
        h: Rows,
    ) -> None:
        """gate_up and quantize of h in one, of paths whose `storage.units` is not "": quantised
        rows [T, H], with scratch for packed ones in `packed`; weights of gate, up and down; routing
        weights [T, K] -> h packed: e4m3 values where down's expert runs on the fp8 units, their
        values x 2^8 as bf16 in `packed` where it does not, and scales.
        """

    def down(
        self, h: Rows, down: Any, routes: RouteTable, numerics: Numerics, slots: Tensor
    ) -> None:
        """h [S, I] -> slots [S, H] at the slot's place (values of bf16 where numerics.slot says
        so).
        """

    def gate_up_down(
        self,
        rows: Rows,
        weights: tuple[Any, Any, Any],
        routes: RouteTable,
        settings: ExpertSettings,
        h: Rows,
        slots: Tensor,
    ) -> None:
        """gate_up (quantised in `a8`) and down in one, of paths whose `storage.one_launch` is set:
        rows [T, H], with scratch for packed ones in `packed` -> slots [S, H]. h is scratch: packed,
        as gate_up or gate_up_quantized gives it.
        """

    def combine(
        self,
        slots: Tensor,
        routed: tuple[Tensor, Tensor],
        num_experts: int,
        numerics: Numerics,
        shared: Tensor | None,
        y: Tensor,
    ) -> None:
        """slots [S, H], routed (expert_ids, weights) [T, K], shared float32 [T, H] or None -> y [T,
        H].

        The weights order equal ids in both classes; only `a16` multiplies by them here.
        """

    def dense_mlp(
        self,
        x: Tensor,
        weights: tuple[Any, Any, Any],
        swiglu_limit: float | None,
        h: Tensor,
        out: Tensor,
    ) -> None:
        """x [T, H] (values of bf16); gate, up, down of one expert, in canonical order -> out
        float32 [T, H]; h [T, I] is scratch.
        """

    def dense_gate_up(
        self, x: Tensor, gate_up: tuple[Any, Any], swiglu_limit: float | None, h: Tensor
    ) -> None:
        """The first half of dense_mlp: x [T, H] -> h [T, I], what its down reads. The second half
        is dense_linear.
        """

    def dense_linear(self, x: Tensor, weight: Any, out: Tensor) -> None:
        """x [T, G, K] (values of bf16); a weight of G groups [G, N, K], in canonical order -> out
        float32 [T, G, N]; on a path that reads what is given also bfloat16, as `finish` rounds it.
        """

    def finish(self, dense: Tensor, y: Tensor) -> None:
        """y = round(+0 + dense): float32 [T, H] to bfloat16 or float32, canonical NaN."""
