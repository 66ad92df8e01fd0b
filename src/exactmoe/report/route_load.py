"""What a trace says: load of each expert, experts that several tokens share, load of each card."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from exactmoe.bank.partition import Partition
from exactmoe.bank.placing import busiest, by_load
from exactmoe.errors import CheckpointError, ConfigError
from exactmoe.report.route_trace import LayerRoutes, RouteTrace

WIDTHS = tuple(range(1, 17))
_FORMAT = 1
# A placement is searched on this many calls: enough for an order of loads, and seconds.
_MOST_CALLS = 256
Floats = NDArray[np.float64]


def loads(routes: LayerRoutes, width: int = 1) -> Floats:
    """[calls, E]: slots that each expert serves in each run of `width` tokens; a last shorter run
    is left out.

    Runs are of consecutive tokens as they were recorded.
    """
    calls = len(routes.expert_ids) // width
    counts = np.zeros((calls, routes.num_experts))
    ids = routes.expert_ids[: calls * width].reshape(calls, width * routes.top_k)
    call, slot = np.nonzero((ids >= 0) & (ids < routes.num_experts))
    np.add.at(counts, (call, ids[call, slot]), 1)
    return counts


def relative_load(routes: LayerRoutes) -> Floats:
    """[E]: slots of each expert over what it had if all experts were chosen equally often."""
    counts = loads(routes).sum(0)
    total = counts.sum()
    return counts * routes.num_experts / total if total else counts


def union(routes: LayerRoutes, width: int) -> float:
    """Distinct experts of `width` consecutive tokens, mean over all such windows; NaN where there
    are fewer tokens.
    """
    chosen = loads(routes) > 0
    windows = len(chosen) - width + 1
    if windows < 1:
        return float("nan")
    together = np.zeros((windows, routes.num_experts), dtype=bool)
    for start in range(width):
        together |= chosen[start : start + windows]
    return float(together.sum(1).mean())


def uniform_union(num_experts: int, top_k: int, width: int) -> float:
    """Expected distinct experts of `width` tokens that each choose K of E at random."""
    return num_experts * (1 - (1 - min(top_k, num_experts) / num_experts) ** width)


@dataclass(frozen=True)
class Shares:
    """How much of a call's slots the busiest card serves, 1 / cards at best.

    Attributes:
        name: of the placement.
        by_width: tokens of a call -> mean share, over layers and calls.
    """

    name: str
    by_width: dict[int, float]


def shares(
    name: str, placement: Mapping[int, Partition], trace: RouteTrace, widths: tuple[int, ...]
) -> Shares:
    """Measured on a trace. Widths for which it has too few tokens are left out.

    Raises:
        ConfigError: the placement misses a layer of the trace, or is of other numbers of experts.
    """
    found: dict[int, list[float]] = {width: [] for width in widths}
    for layer, routes in trace.layers.items():
        if layer not in placement:
            raise ConfigError(f"placement {name!r} has no layer {layer}; it has {list(placement)}")
        partition = placement[layer]
        partition.require(routes.num_experts, partition.num_cards)
        for width in widths:
            calls = loads(routes, width)
            if len(calls) and calls.sum():
                mean = busiest(partition, torch.from_numpy(calls))
                found[width].append(mean / float(calls.sum(1).mean()))
    return Shares(name, {width: float(np.mean(part)) for width, part in found.items() if part})


def even(trace: RouteTrace, num_cards: int) -> dict[int, Partition]:
    """Consecutive experts in equal parts."""
    return {
        layer: Partition.even(routes.num_experts, num_cards)
        for layer, routes in trace.layers.items()
    }


def placed(trace: RouteTrace, num_cards: int) -> dict[int, Partition]:
    """A placement of each layer from its loads, as many experts a card as `even` gives.

    Made for calls of one token: there the busiest card decides the time of a step.
    """
    return {
        layer: by_load(torch.from_numpy(_some(loads(routes))), num_cards)
        for layer, routes in trace.layers.items()
    }


def _some(calls: Floats) -> Floats:
    """Calls at even distances, at most _MOST_CALLS."""
    step = -(-len(calls) // _MOST_CALLS)
    return calls[:: max(step, 1)]


def halves(trace: RouteTrace) -> tuple[RouteTrace, RouteTrace]:
    """The first and the second half of each layer's tokens."""
    return _half(trace, first=True), _half(trace, first=False)


def _half(trace: RouteTrace, first: bool) -> RouteTrace:
    def cut(routes: LayerRoutes) -> LayerRoutes:
        middle = len(routes.steps) // 2
        part = slice(0, middle) if first else slice(middle, None)
        arrays = (routes.steps[part], routes.tokens[part], routes.expert_ids[part])
        return LayerRoutes(routes.num_experts, routes.is_hashed, *arrays, lost=routes.lost)

    return RouteTrace({layer: cut(routes) for layer, routes in trace.layers.items()})


def write_placement(path: str | Path, placement: Mapping[int, Partition]) -> None:
    """A JSON file: layer -> the card of each expert, as Partition(owners) takes it."""
    content = {
        "format": _FORMAT,
        "layers": {str(layer): list(part.owners) for layer, part in placement.items()},
    }
    Path(path).write_text(json.dumps(content) + "\n", encoding="ascii")


def read_placement(path: str | Path) -> dict[int, Partition]:
    """What `write_placement` wrote.

    Raises:
        CheckpointError: the file cannot be read or is no placement.
        ConfigError: owners that no partition has.
    """
    try:
        content: Any = json.loads(Path(path).read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            raise CheckpointError(f"{path}: format is {content['format']}; allowed: {_FORMAT}")
        owners = {int(layer): tuple(cards) for layer, cards in content["layers"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is no placement: {error!r}") from error
    return {layer: Partition(cards, rule=str(path)) for layer, cards in owners.items()}
