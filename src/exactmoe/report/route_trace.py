"""RouteTrace: what the tokens of a run chose in each layer, recorded, kept in one .npz file.

with tracing({3: layer}) as read:
    model(...)
read().save("routes.npz")
"""

import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from exactmoe.errors import CheckpointError, ConfigError
from exactmoe.layer import MoELayer
from exactmoe.runtime.trace import RouteRing

CAPACITY = 65536
_FORMAT = 1
_PARTS = ("steps", "tokens", "expert_ids")
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


@dataclass(frozen=True, eq=False)
class RouteTrace:
    """Routes of a run: index of the model's layer -> its routes."""

    layers: dict[int, LayerRoutes]

    def save(self, path: str | Path) -> None:
        """Write an .npz file: format, layers [L], facts [L, 3] (experts, is_hashed, lost), and
        layer_N_steps, layer_N_tokens, layer_N_expert_ids.
        """
        arrays: dict[str, Ints] = {
            "format": np.array([_FORMAT]),
            "layers": np.array(list(self.layers), dtype=np.int64),
            "facts": np.array(
                [[r.num_experts, r.is_hashed, r.lost] for r in self.layers.values()], dtype=np.int64
            ),
        }
        for layer, routes in self.layers.items():
            arrays |= {f"layer_{layer}_{part}": getattr(routes, part) for part in _PARTS}
        with Path(path).open("wb") as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: str | Path) -> "RouteTrace":
        """What `save` wrote.

        Raises:
            CheckpointError: the file is missing or is no such trace.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                if file["format"].tolist() != [_FORMAT]:
                    raise CheckpointError(
                        f"{path}: format is {file['format'].tolist()}; allowed: [{_FORMAT}]"
                    )
                facts = zip(file["layers"].tolist(), file["facts"].tolist(), strict=True)
                layers = {
                    layer: LayerRoutes(
                        num_experts=experts,
                        is_hashed=bool(hashed),
                        lost=lost,
                        **{part: file[f"layer_{layer}_{part}"] for part in _PARTS},
                    )
                    for layer, (experts, hashed, lost) in facts
                }
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise CheckpointError(f"{path} is no trace of routes: {error}") from error
        for layer, routes in layers.items():
            count = len(routes.steps)
            if routes.expert_ids.ndim != 2 or {len(routes.tokens), len(routes.expert_ids)} != {
                count
            }:
                raise CheckpointError(f"{path}: the arrays of layer {layer} differ in length")
        return cls(layers)


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
