"""The calls of this package that are timed."""

from typing import Any, cast

import torch
from torch import Tensor

from exactmoe import ops
from exactmoe.bench.problem import Selection
from exactmoe.bench.timing import Call
from exactmoe.block import Space
from exactmoe.dense import DenseMLP
from exactmoe.layer import MoELayer
from exactmoe.routed import routed_slots
from exactmoe.runtime import workspace
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


class Scratch:
    """What the ops of a call write, for calls of up to `rows` tokens that run one at a time: the
    arrays of a layer, in memory of their own.
    """

    def __init__(self, layer: MoELayer, rows: int) -> None:
        path = ops.path(layer.plan().path)
        self.arrays = {
            region.name: torch.empty(region.shape, dtype=region.dtype, device=layer.device)
            for region in layer.regions(rows, path.storage)
        }
        self.path = path


class _SortedBefore:
    """A path whose route tables are made already."""

    def __init__(self, path: ops.Path) -> None:
        self._path = path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._path, name)

    def route_table(self, expert_ids: Tensor, num_experts: int, routes: RouteTable) -> None:
        """Nothing: `routes` holds the table of these ids."""


class Presorted:
    """Routed experts alone: what the layer runs, with a route table made before."""

    def __init__(self, layer: MoELayer, selection: Selection, scratch: Scratch) -> None:
        path, ids = scratch.path, selection.expert_ids
        offsets, slots = (torch.empty_like(scratch.arrays[name]) for name in ("offsets", "sorted"))
        fault = torch.zeros_like(layer.fault)
        table = RouteTable(offsets, slots[: ids.numel()], fault)
        path.route_table(ids, layer.config.num_experts, table)
        arrays = {**scratch.arrays, "offsets": offsets, "sorted": slots}
        sorted_before = cast(ops.Path, _SortedBefore(path))
        self._space = Space(sorted_before, arrays, workspace.arena(layer.device))
        self._layer, self._routed = layer, (ids, selection.weights)
        reads = self._space.reads(selection.x)
        self._x = selection.x if reads else selection.x.to(path.storage.x)
        self.y = empty_output(layer, selection.x)

    def __call__(self) -> Tensor:
        layer, routed, path = self._layer, self._routed, self._space.path
        slots = routed_slots(layer, self._space, self._x, routed)
        path.combine(slots, routed, layer.config.num_experts, layer.numerics, None, self.y)
        return self.y
