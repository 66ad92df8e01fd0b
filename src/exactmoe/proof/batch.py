"""Batch: the inputs of one call, and the entries of a layer that take them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from exactmoe.dense import DenseMLP
from exactmoe.layer import MoELayer
from exactmoe.proof.numbers import integers, permutations, units, wide


@dataclass(frozen=True, eq=False)
class Batch:
    """T tokens of one call.

    Attributes:
        x: bfloat16 [T, H].
        token_ids: int64 [T], for a hash layer's whole block; else None.
        expert_ids: int32 [T, K], for `layer.experts`; else None.
        weights: float32 [T, K], for `layer.experts`; else None.
    """

    x: Tensor
    token_ids: Tensor | None = None
    expert_ids: Tensor | None = None
    weights: Tensor | None = None

    @property
    def width(self) -> int:
        return self.x.shape[0]

    def tensors(self) -> dict[str, Tensor]:
        """The inputs that are there, by name."""
        named = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def map(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        """Every input changed in the same way."""
        return Batch(**{name: change(tensor) for name, tensor in self.tensors().items()})

    def rows(self, index: slice | Tensor) -> "Batch":
        """Some rows, as memory of their own."""
        return self.map(lambda tensor: tensor[index].clone())

    def repeated(self, width: int) -> "Batch":
        """A batch of one token, `width` times."""
        return self.map(lambda tensor: tensor.expand(width, *tensor.shape[1:]).clone())

    def with_rows(self, positions: Sequence[int], others: Sequence["Batch"]) -> "Batch":
        """A copy in which the token at each position is the one of a batch of one token."""
        changed = self.map(torch.clone)
        for position, other in zip(positions, others, strict=True):
            for name, tensor in changed.tensors().items():
                tensor[position] = other.tensors()[name][0]
        return changed

    def scaled(self, factor: float) -> "Batch":
        """x multiplied, all else as it is."""
        return replace(self, x=self.x * factor)


@dataclass(frozen=True)
class Entry:
    """One way into a layer: "block" (router, experts, shared), "experts", or "dense".

    Attributes:
        name: as above.
        layer: the layer; its own `forward` and `experts` are called, so a subclass is proved as it
            is.
    """

    name: str
    layer: MoELayer | DenseMLP

    @property
    def hidden_size(self) -> int:
        layer = self.layer
        return layer.hidden_size if isinstance(layer, DenseMLP) else layer.config.hidden_size

    @property
    def is_hashed(self) -> bool:
        """Whether the router takes its ids from a table, by token id."""
        layer = self.layer
        router = None if isinstance(layer, DenseMLP) else layer.router
        return router is not None and router.table is not None

    @property
    def num_experts(self) -> int:
        """E; a dense MLP counts as one."""
        layer = self.layer
        return 1 if isinstance(layer, DenseMLP) else layer.config.num_experts

    def __call__(self, batch: Batch, out: Tensor | None = None) -> Tensor:
        """y [T, H] of the batch."""
        layer: Any = self.layer
        if self.name == "dense":
            return layer(batch.x, out=out)
        if self.name == "block":
            return layer(batch.x, token_ids=batch.token_ids, out=out)
        return layer.experts(batch.x, batch.expert_ids, batch.weights, out=out)

    def random(self, width: int, stream: int) -> Batch:
        """A batch of `width` tokens, the same on every machine."""
        layer, device = self.layer, self.layer.device
        x = wide((width, self.hidden_size), stream, device).bfloat16()
        if isinstance(layer, DenseMLP):
            return Batch(x)
        config = layer.config
        if self.name == "block":
            table: Any = None if layer.router is None else layer.router.table
            if table is None:
                return Batch(x)
            return Batch(x, integers((width,), stream + 1, 0, table.shape[0] - 1, device))
        if config.top_k <= config.num_experts:
            experts = permutations(width, config.num_experts, stream + 2, device)[:, : config.top_k]
        else:
            experts = integers((width, config.top_k), stream + 2, 0, config.num_experts - 1, device)
        weights = units((width, config.top_k), stream + 3, device)
        return Batch(x, expert_ids=experts.int().contiguous(), weights=weights)


def entries(layer: MoELayer | DenseMLP) -> list[Entry]:
    """The entries that a layer has: a MoE layer without a router has no whole block."""
    if isinstance(layer, DenseMLP):
        return [Entry("dense", layer)]
    names = ["experts"] if layer.router is None else ["block", "experts"]
    return [Entry(name, layer) for name in names]
