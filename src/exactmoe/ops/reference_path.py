"""The reference as a path: `exactmoe.reference`, function by function, writing where the layer
says.
"""

import torch
from torch import Tensor

from exactmoe import reference
from exactmoe.config import Numerics
from exactmoe.formats import PackedWeight
from exactmoe.formats.rows import Rows
from exactmoe.formats.scales import decode_e4m3
from exactmoe.ops.cards import TorchCards
from exactmoe.ops.path import DECODED, RouterWeights
from exactmoe.runtime.float_environment import default_float_environment
from exactmoe.runtime.routes import RouteTable


class ReferencePath:
    """Plain loops of torch operations; see ops/path.py for the shapes.

    The floating-point environment is set on the calling thread; torch's own threads, which only
    large tensors use, keep theirs.
    """

    name = "reference"
    storage = DECODED

    @property
    def cards(self) -> TorchCards:
        return TorchCards(self.combine)

    def prepare(self, weight: PackedWeight) -> PackedWeight:
        return weight

    @default_float_environment()
    def quantize(self, values: Tensor, out: Rows) -> Rows:
        codes, scales = reference.quantize(values)
        out.values.copy_(decode_e4m3(codes))
        if out.scales is not None:
            out.scales.copy_(scales)
        return out

    @default_float_environment()
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
        logits.copy_(reference.router_logits(x, router.weight_f32))
        if router.table is None:
            top_k = routed[0].shape[1]
            ids, scores = reference.select(logits, router.bias, top_k, router.config, numerics)
        else:
            assert token_ids is not None
            ids, scores = reference.look_up(
                logits, router.table, token_ids, router.config, numerics
            )
        routed[0].copy_(ids)
        routed[1].copy_(reference.routing_weights(scores, router.config, numerics))

    def route_table(self, expert_ids: Tensor, num_experts: int, routes: RouteTable) -> None:
        ids = expert_ids.flatten().long()
        present = (ids >= 0) & (ids < num_experts)
        routes.fault[0] |= int((ids >= num_experts).any())
        keys = torch.where(present, ids, torch.full_like(ids, num_experts))
        routes.slots.copy_(torch.argsort(keys, stable=True))
        routes.offsets[0] = 0
        counts = torch.bincount(keys, minlength=num_experts + 1)[:num_experts]
        routes.offsets[1:].copy_(torch.cumsum(counts, 0))

    @default_float_environment()
    def gate_up(
        self,
        rows: Rows,
        gate_up: tuple[PackedWeight, PackedWeight],
        routes: RouteTable,
        weights: Tensor | None,
        swiglu_limit: float | None,
        h: Tensor,
    ) -> None:
        top_k = h.shape[0] // max(rows.values.shape[0], 1)
        for expert, slots in _served(routes):
            picked = _pick(rows, slots // top_k)
            slot_weights = None if weights is None else weights.flatten()[slots]
            h[slots] = reference.gate_up(picked, *gate_up, expert, swiglu_limit, slot_weights)

    @default_float_environment()
    def down(
        self, h: Rows, down: PackedWeight, routes: RouteTable, numerics: Numerics, slots: Tensor
    ) -> None:
        for expert, served in _served(routes):
            slots[served] = reference.down(_pick(h, served), down, expert, numerics)

    @default_float_environment()
    def combine(
        self,
        slots: Tensor,
        routed: tuple[Tensor, Tensor],
        num_experts: int,
        numerics: Numerics,
        shared: Tensor | None,
        y: Tensor,
    ) -> None:
        expert_ids, weights = routed
        per_token = slots.view(*expert_ids.shape, slots.shape[-1])
        combined = reference.combine(
            per_token, expert_ids, weights, num_experts, numerics.activation
        )
        y.copy_(reference.finish(combined, shared, _output(y)))

    @default_float_environment()
    def dense_mlp(
        self,
        x: Tensor,
        weights: tuple[PackedWeight, PackedWeight, PackedWeight],
        swiglu_limit: float | None,
        h: Tensor,
        out: Tensor,
    ) -> None:
        out.copy_(reference.dense_mlp(x, *weights, swiglu_limit))

    @default_float_environment()
    def dense_gate_up(
        self,
        x: Tensor,
        gate_up: tuple[PackedWeight, PackedWeight],
        swiglu_limit: float | None,
        h: Tensor,
    ) -> None:
        h.copy_(reference.dense_gate_up(x, *gate_up, swiglu_limit))

    @default_float_environment()
    def dense_linear(self, x: Tensor, weight: PackedWeight, out: Tensor) -> None:
        out.copy_(reference.dense_linear(x, weight))

    @default_float_environment()
    def finish(self, dense: Tensor, y: Tensor) -> None:
        y.copy_(reference.finish(torch.zeros_like(dense), dense, _output(y)))


def _output(y: Tensor) -> str:
    return "bf16" if y.dtype == torch.bfloat16 else "f32"


def _served(routes: RouteTable) -> list[tuple[int, Tensor]]:
    """(expert, its slots) for every expert that serves any."""
    bounds = routes.offsets.tolist()
    pairs = zip(bounds, bounds[1:], strict=False)
    return [
        (expert, routes.slots[low:high]) for expert, (low, high) in enumerate(pairs) if high > low
    ]


def _pick(rows: Rows, index: Tensor) -> Rows:
    return Rows(rows.values[index], None if rows.scales is None else rows.scales[index])
