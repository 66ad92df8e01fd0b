"""Path: the ops that a layer calls, one set a backend. All paths give the same bits."""

from typing import Any, Protocol

from torch import Tensor

from exactmoe.config import Numerics, RouterConfig
from exactmoe.formats import PackedWeight
from exactmoe.formats.rows import Rows
from exactmoe.runtime.routes import RouteTable


class RouterWeights(Protocol):
    """What a router op reads: weight_f32 [E, H], bias f32 [E] or None, table i64 [V, K] or None."""

    bias: Any
    table: Any
    config: RouterConfig

    @property
    def weight_f32(self) -> Tensor: ...


class Path(Protocol):
    """One backend's ops. Shapes: T tokens, K slots a token, S = T x K, H hidden, I intermediate.
    Outputs are given.
    """

    name: str

    def prepare(self, weight: PackedWeight) -> Any:
        """What this path needs to read a packed weight; shares its memory."""

    def quantize(self, values: Tensor, out: Rows) -> Rows:
        """`a8` activations: float32 [T, K] -> decoded e4m3 values and scales."""

    def router(
        self,
        x: Tensor,
        router: RouterWeights,
        token_ids: Tensor | None,
        numerics: Numerics,
        logits: Tensor,
        routed: tuple[Tensor, Tensor],
    ) -> None:
        """x float32 [T, H] (values of bf16) -> logits float32 [T, E], and routed: expert_ids int32
        [T, K] and weights float32 [T, K].
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
        """rows [T, H] -> h float32 [S, I] at the slot's place; weights [T, K] multiply h in `a8`
        and are None in `a16`.
        """

    def down(
        self, h: Rows, down: Any, routes: RouteTable, numerics: Numerics, slots: Tensor
    ) -> None:
        """h [S, I] -> slots float32 [S, H] at the slot's place (values of bf16 where numerics.slot
        says so).
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
        """x float32 [T, H] (values of bf16); gate, up, down of one expert -> out float32 [T, H]; h
        [T, I] is scratch.
        """

    def finish(self, dense: Tensor, y: Tensor) -> None:
        """y = round(+0 + dense): float32 [T, H] to bfloat16 or float32, canonical NaN."""
