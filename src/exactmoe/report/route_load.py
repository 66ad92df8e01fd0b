"""What a trace says: load of each expert, experts that several tokens share, load of each card."""

import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from exactmoe.bank.partition import Partition
from exactmoe.bank.placing import by_load
from exactmoe.errors import CheckpointError, ConfigError
from exactmoe.kernels.cpu import route_counts
from exactmoe.report.route_trace import LayerRoutes, RouteTrace

WIDTHS = tuple(range(1, 17))
_FORMAT = 1
# A placement is searched on this many calls: enough for an order of loads, and seconds.
_MOST_CALLS = 256
Floats = NDArray[np.float64]
_Given = TypeVar("_Given")
_Made = TypeVar("_Made")


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
    counts = np.zeros(routes.num_experts, dtype=np.int64)
    route_counts.slots_of_experts(_ids(routes), counts)
    total = counts.sum()
    return counts * routes.num_experts / total if total else counts.astype(np.float64)


def unions(routes: LayerRoutes, widest: int = WIDTHS[-1]) -> list[float]:
    """Distinct experts of 1, 2, ... `widest` consecutive tokens, mean over all such windows; NaN
    where there are fewer tokens.
    """
    sums = np.zeros(widest, dtype=np.int64)
    route_counts.distinct_in_windows(_ids(routes), routes.num_experts, sums)
    windows = len(routes.expert_ids) - np.arange(widest)
    return [
        float(total / count) if count > 0 else float("nan")
        for total, count in zip(sums, windows, strict=True)
    ]


@dataclass(frozen=True, eq=False)
class Counted:
    """What is counted in one layer.

    Attributes:
        num_experts, top_k, is_hashed, tokens, lost: of its routes.
        relative_load: [E], see `relative_load`.
        unions: [16], distinct experts of 1 to 16 consecutive tokens.
    """

    num_experts: int
    top_k: int
    is_hashed: bool
    tokens: int
    lost: int
    relative_load: Floats
    unions: list[float]

    @classmethod
    def of(cls, routes: LayerRoutes) -> "Counted":
        return cls(
            num_experts=routes.num_experts,
            top_k=routes.top_k,
            is_hashed=routes.is_hashed,
            tokens=len(routes.steps),
            lost=routes.lost,
            relative_load=relative_load(routes),
            unions=unions(routes),
        )

    @property
    def uniform_unions(self) -> list[float]:
        """`unions` under uniform routing."""
        return [uniform_union(self.num_experts, self.top_k, width) for width in WIDTHS]


def counted(trace: RouteTrace) -> dict[int, Counted]:
    """Every layer, several at once."""
    return dict(zip(trace.layers, _at_once(Counted.of, trace.layers.values()), strict=True))


def _at_once(work: Callable[[_Given], _Made], given: Iterable[_Given]) -> list[_Made]:
    """work() of each, in threads: the counting holds no lock of Python's."""
    with ThreadPoolExecutor() as threads:
        return list(threads.map(work, given))


def _ids(routes: LayerRoutes) -> NDArray[np.int32]:
    return np.ascontiguousarray(routes.expert_ids, dtype=np.int32)


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
    for layer, routes in trace.layers.items():
        if layer not in placement:
            raise ConfigError(f"placement {name!r} has no layer {layer}; it has {list(placement)}")
        placement[layer].require(routes.num_experts, placement[layer].num_cards)

    def measured(layer: int) -> NDArray[np.int64]:
        partition, sums = placement[layer], np.zeros((len(widths), 2), dtype=np.int64)
        owners = np.array(partition.owners, dtype=np.int64)
        given = np.array(widths, dtype=np.int64)
        ids = _ids(trace.layers[layer])
        route_counts.slots_of_busiest(ids, owners, partition.num_cards, given, sums)
        return sums

    found: dict[int, list[float]] = {width: [] for width in widths}
    for sums in _at_once(measured, trace.layers):
        for width, (most, total) in zip(widths, sums.tolist(), strict=True):
            if total:
                found[width].append(most / total)
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

    def one(routes: LayerRoutes) -> Partition:
        return by_load(torch.from_numpy(loads(_some(routes))), num_cards)

    return dict(zip(trace.layers, _at_once(one, trace.layers.values()), strict=True))


def _some(routes: LayerRoutes) -> LayerRoutes:
    """Tokens at even distances, at most _MOST_CALLS."""
    step = max(-(-len(routes.steps) // _MOST_CALLS), 1)
    return _tokens(routes, slice(None, None, step))


def halves(trace: RouteTrace) -> tuple[RouteTrace, RouteTrace]:
    """The first and the second half of each layer's tokens."""
    return _half(trace, first=True), _half(trace, first=False)


def _half(trace: RouteTrace, first: bool) -> RouteTrace:
    def cut(routes: LayerRoutes) -> LayerRoutes:
        middle = len(routes.steps) // 2
        return _tokens(routes, slice(None, middle) if first else slice(middle, None))

    return RouteTrace({layer: cut(routes) for layer, routes in trace.layers.items()})


def _tokens(routes: LayerRoutes, part: slice) -> LayerRoutes:
    """Some of the tokens."""
    arrays = (routes.steps[part], routes.tokens[part], routes.expert_ids[part])
    return LayerRoutes(routes.num_experts, routes.is_hashed, *arrays, lost=routes.lost)


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
