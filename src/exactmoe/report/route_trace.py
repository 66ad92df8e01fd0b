"""RouteTrace: what the tokens of a run chose in each layer, recorded, kept in one file.

with tracing({3: layer}) as read:
    model(...)
read().save("routes.npz")
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from exactmoe.errors import ConfigError
from exactmoe.layer import MoELayer
from exactmoe.report import route_files as files
from exactmoe.runtime.trace import RouteRing

CAPACITY = 65536
Ints = NDArray[np.int32] | NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class LayerRoutes:
    """The routes of one layer, oldest token first.

    Attributes:
        num_experts: E.
        is_hashed: whether the ids come from a table by token id.
        steps: int64 [N], pieces of calls, counted from 0.
        tokens: int64 [N], the token's row in its step.
        expert_ids: int32 [N, K]; below 0 or from E on: absent.
        lost: tokens that the ring no longer had.
    """

    num_experts: int
    is_hashed: bool
    steps: Ints
    tokens: Ints
    expert_ids: Ints
    lost: int = 0

    @property
    def top_k(self) -> int:
        return int(self.expert_ids.shape[1])

    @classmethod
    def of(cls, facts: files.Facts, arrays: files.Arrays) -> "LayerRoutes":
        """From what a file holds."""
        return cls(facts.num_experts, facts.is_hashed, *arrays, lost=facts.lost)

    def parts(self) -> tuple[files.Facts, files.Arrays]:
        """As a file holds them."""
        facts = files.Facts(self.num_experts, self.is_hashed, self.lost)
        return facts, files.Arrays(self.steps, self.tokens, self.expert_ids)


@dataclass(frozen=True, eq=False)
class RouteTrace:
    """Routes of a run: index of the model's layer -> its routes."""

    layers: dict[int, LayerRoutes]

    def save(self, path: str | Path) -> None:
        """Write a file whose name ends with .npz or .parquet (report/route_files.py).

        Raises:
            ConfigError: another ending.
            Unsupported: .parquet, and pyarrow is not installed.
        """
        write = {".npz": files.write_npz, ".parquet": files.write_parquet}[files.suffix_of(path)]
        write(path, {layer: routes.parts() for layer, routes in self.layers.items()})

    @classmethod
    def load(cls, path: str | Path, known: Mapping[int, files.Facts] | None = None) -> "RouteTrace":
        """A trace that was saved, or a .parquet file of another program.

        Args:
            known: facts of the layers, for a .parquet file that does not say them.

        Raises:
            CheckpointError: the file is missing, is no such trace, or does not say its facts.
            ConfigError: a name with another ending.
            Unsupported: .parquet, and pyarrow is not installed.
        """
        if files.suffix_of(path) == ".npz":
            layers = files.read_npz(path)
        else:
            layers = files.read_parquet(path, known)
        return cls({i: LayerRoutes.of(*found) for i, found in layers.items()})


@contextmanager
def tracing(
    layers: Mapping[int, MoELayer], capacity: int = CAPACITY
) -> Iterator[Callable[[], RouteTrace]]:
    """While it lasts, the layers record what their tokens choose; it gives a function that reads
    the trace so far. Layers must be on their devices before.

    Args:
        layers: index of the model's layer -> MoELayer.
        capacity: tokens that each layer keeps; later ones overwrite the oldest.

    Raises:
        ConfigError: no layer, or a layer that is traced already.
    """
    if not layers:
        raise ConfigError("there is no layer to trace; allowed: one or more MoELayers")
    busy = [index for index, layer in layers.items() if layer.route_ring is not None]
    if busy:
        raise ConfigError(f"layers {busy} are traced already; allowed: one trace at a time")
    rings = {
        index: RouteRing(layer.device, layer.config.top_k, capacity)
        for index, layer in layers.items()
    }

    def read() -> RouteTrace:
        return RouteTrace({index: _routes(layers[index], ring) for index, ring in rings.items()})

    for index, layer in layers.items():
        layer.route_ring = rings[index]
    try:
        yield read
    finally:
        for layer in layers.values():
            layer.route_ring = None


def _routes(layer: MoELayer, ring: RouteRing) -> LayerRoutes:
    held = ring.read()
    return LayerRoutes(
        num_experts=layer.config.num_experts,
        is_hashed=layer.router is not None and layer.router.table is not None,
        steps=held.steps.numpy(),
        tokens=held.tokens.numpy(),
        expert_ids=held.expert_ids.numpy(),
        lost=held.lost,
    )
