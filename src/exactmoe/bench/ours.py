"""The calls of this package that are timed."""

from dataclasses import dataclass

import torch
from torch import Tensor

from exactmoe import ops
from exactmoe.bench.problem import Selection
from exactmoe.bench.timing import Call
from exactmoe.dense import DenseMLP
from exactmoe.formats.rows import Rows
from exactmoe.layer import MoELayer
from exactmoe.runtime.door import OUTPUT_DTYPES
from exactmoe.runtime.routes import RouteTable


def empty_output(layer: MoELayer | DenseMLP, x: Tensor) -> Tensor:
    """y of a call, not written."""
    return torch.empty_like(x, dtype=OUTPUT_DTYPES[layer.numerics.output])


def with_sort(layer: MoELayer, selection: Selection) -> Call:
    """Routed experts, the sort included."""
    x, ids, weights = selection.x, selection.expert_ids, selection.weights
    y = empty_output(layer, x)
    return lambda: layer.experts(x, ids, weights, out=y)


def block(layer: MoELayer, selection: Selection) -> Call:
    """The whole block: router, sort, experts, shared expert, combine."""
    x, y = selection.x, empty_output(layer, selection.x)
    return lambda: layer(x, out=y)


def dense(layer: DenseMLP, x: Tensor) -> Call:
    """A dense MLP."""
    y = empty_output(layer, x)
    return lambda: layer(x, out=y)


@dataclass(frozen=True, eq=False)
class Scratch:
    """What the ops of a call write, for calls of up to `rows` tokens that run one at a time."""

    regions: dict[str, Tensor]

    @classmethod
    def of(cls, layer: MoELayer, rows: int) -> "Scratch":
        """The regions of a layer, in memory of their own."""
        storage = ops.path(layer.plan().backend).storage
        needed = ("x", "h", "slots", "x_codes", "x_scales", "h_codes", "h_scales")
        return cls(
            {
                region.name: torch.empty(region.shape, dtype=region.dtype, device=layer.device)
                for region in layer.regions(rows, storage)
                if region.name in needed
            }
        )


class Presorted:
    """Routed experts alone: the ops of the layer with a route table made before."""

    def __init__(self, layer: MoELayer, selection: Selection, scratch: Scratch) -> None:
        self.layer, self.selection, self.scratch = layer, selection, scratch
        self.path = ops.path(layer.plan().backend)
        storage, slots = self.path.storage, selection.expert_ids.numel()
        experts, device = layer.config.num_experts, layer.device
        self.routes = RouteTable(
            torch.empty(experts + 1, dtype=storage.index, device=device),
            torch.empty(slots, dtype=storage.index, device=device),
            torch.zeros(1, dtype=torch.int64, device=device),
        )
        self.path.route_table(selection.expert_ids, experts, self.routes)
        self.x = selection.x
        if not storage.reads_given:
            self.x = scratch.regions["x"][: selection.num_tokens].clone().copy_(selection.x)
        self.y = empty_output(layer, selection.x)

    def __call__(self) -> Tensor:
        path, config, numerics = self.path, self.layer.config, self.layer.numerics
        ids, weights = self.selection.expert_ids, self.selection.weights
        tokens, slots, region = ids.shape[0], ids.numel(), self.scratch.regions
        a8 = numerics.activation == "a8"
        gate, up, down = self.layer.bank.prepared_for(path)
        count = slots if a8 else path.storage.rows_of_h(slots, config.num_experts)
        packed = region["packed_x"][:count] if path.storage.packed else None
        rows, h = Rows(self.x, None, packed), region["h"][:count]
        if a8:
            codes = Rows(region["x_codes"][:tokens], region["x_scales"][:tokens])
            rows = path.quantize(self.x, codes)
        factors = weights if a8 else None
        path.gate_up(rows, (gate, up), self.routes, factors, config.swiglu_limit, h)
        h_rows = Rows(h, None)
        if a8:
            codes = Rows(region["h_codes"][:slots], region["h_scales"][:slots])
            h_rows = path.quantize(h, codes)
        out = region["slots"][:slots]
        path.down(h_rows, down, self.routes, numerics, out)
        path.combine(out, (ids, weights), config.num_experts, numerics, None, self.y)
        return self.y
