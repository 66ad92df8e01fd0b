"""profile: how long each step of each layer takes, while a model or a layer runs.

with exactmoe.profile(model) as profiled:
    model(...)
print(profiled)
profiled.save_trace("trace.json")
"""

import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from exactmoe.dense import DenseMLP
from exactmoe.errors import ConfigError
from exactmoe.layer import MoELayer
from exactmoe.runtime.spans import CAPACITY, NAMES, LayerSpans, Recorder, Span

Layer = MoELayer | DenseMLP


@dataclass(frozen=True)
class Row:
    """Calls of one width of one layer. Medians over them, microseconds.

    Attributes:
        layer: its index.
        kind: "moe" or "dense".
        width: tokens of a piece.
        calls: how many were recorded.
        us: span -> its time in a call, on every card and stream.
        beside_us: the part of it that ran beside the call's own stream: on a second stream of the
            card, or on another card.
        call_us: from the first step to the last.
        rest_us: `call_us` less the spans on the call's own stream: the host between two steps, for
            which a GPU waits.
    """

    layer: int
    kind: str
    width: int
    calls: int
    us: dict[str, float]
    beside_us: dict[str, float]
    call_us: float
    rest_us: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class GraphRow:
    """A captured pass over the layers: microseconds of each layer's call, medians over the replays
    that were sampled.
    """

    graph: int
    width: int
    replays: int
    us: dict[int, float]

    @property
    def total_us(self) -> float:
        """All layers."""
        return sum(self.us.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        layers = {str(layer): us for layer, us in self.us.items()}
        return {**self.__dict__, "us": layers, "total_us": self.total_us}


@dataclass(eq=False)
class Profile:
    """What was recorded. It can be read while recording goes on, and after it.

    Attributes:
        layers: index -> the layer.
        recorder: of the spans.
    """

    layers: dict[int, Layer]
    recorder: Recorder
    _graphs: dict[tuple[int, int], dict[int, list[float]]] = field(default_factory=dict)

    @property
    def lost(self) -> int:
        """Spans beyond the capacity."""
        return self.recorder.lost

    def spans(self) -> list[Span]:
        """Every span of eager calls. Waits for the devices."""
        return self.recorder.spans()

    def rows(self) -> list[Row]:
        """Eager calls: a row for each width and layer. Waits for the devices."""
        calls: dict[int, list[Span]] = {}
        for one in self.spans():
            calls.setdefault(one.call, []).append(one)
        groups: dict[tuple[int, int], list[_Call]] = {}
        for spans in calls.values():
            made = _Call.of(spans)
            if made is not None:
                groups.setdefault((made.width, made.layer), []).append(made)
        return [self._row(layer, width, groups[width, layer]) for width, layer in sorted(groups)]

    def _row(self, layer: int, width: int, calls: list["_Call"]) -> Row:
        us = _medians([call.us for call in calls])
        beside = _medians([call.beside for call in calls])
        whole = statistics.median(call.whole for call in calls)
        return Row(
            layer=layer,
            kind="dense" if isinstance(self.layers[layer], DenseMLP) else "moe",
            width=width,
            calls=len(calls),
            us=us,
            beside_us=beside,
            call_us=whole,
            rest_us=max(0.0, whole - sum(us.values()) + sum(beside.values())),
        )

    def sample_graphs(self) -> None:
        """Reads the times of the latest replay of each captured graph: the next one overwrites
        them. Waits for the devices.
        """
        for one in self.recorder.captured():
            if one.seconds is not None:
                samples = self._graphs.setdefault((one.graph, one.width), {})
                samples.setdefault(one.layer, []).append(1e6 * one.seconds)

    def graphs(self) -> list[GraphRow]:
        """Captured passes that were replayed; reads the latest replay if none was sampled."""
        if not self._graphs:
            self.sample_graphs()
        return [
            GraphRow(
                graph=graph,
                width=width,
                replays=max(map(len, samples.values())),
                us={layer: statistics.median(times) for layer, times in samples.items()},
            )
            for (graph, width), samples in sorted(self._graphs.items())
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON: layers (backend, class), eager rows, graphs."""
        layers = [
            {
                "layer": index,
                "kind": "dense" if isinstance(layer, DenseMLP) else "moe",
                "backend": layer.plan().backend,
                "numerics": layer.numerics.to_dict(),
            }
            for index, layer in self.layers.items()
        ]
        return {
            "layers": layers,
            "eager": [row.to_dict() for row in self.rows()],
            "graphs": [row.to_dict() for row in self.graphs()],
            "lost_spans": self.lost,
        }

    def save_trace(self, path: str) -> None:
        """Write the eager calls as JSON that Perfetto (ui.perfetto.dev) and chrome://tracing open.

        Raises:
            ConfigError: the file cannot be written.
        """
        from exactmoe.report.profile_trace import write_trace

        write_trace(path, self.spans())

    def __str__(self) -> str:
        from exactmoe.report.profile_tables import text

        return text(self)


def _medians(calls: list[dict[str, float]]) -> dict[str, float]:
    """Of the spans that any of the calls has, in the order of a call."""
    return {
        name: statistics.median(us.get(name, 0.0) for us in calls)
        for name in NAMES
        if any(name in us for us in calls)
    }


@dataclass(frozen=True)
class _Call:
    """One recorded piece, microseconds."""

    layer: int
    width: int
    us: dict[str, float]
    beside: dict[str, float]
    whole: float

    @classmethod
    def of(cls, spans: list[Span]) -> "_Call | None":
        """None for one whose end is not recorded: it failed, or is beyond the capacity."""
        whole = next((one for one in spans if one.name == "call"), None)
        if whole is None:
            return None
        us: dict[str, float] = {}
        beside: dict[str, float] = {}
        for one in spans:
            if one is whole or one.inner:
                continue
            us[one.name] = us.get(one.name, 0.0) + 1e6 * one.seconds
            if (one.card, one.lane) != (whole.card, whole.lane) and one.lane:
                beside[one.name] = beside.get(one.name, 0.0) + 1e6 * one.seconds
        return cls(whole.layer, whole.width, us, beside, 1e6 * whole.seconds)


@contextmanager
def profile(model: nn.Module | Mapping[int, Layer], capacity: int = CAPACITY) -> Iterator[Profile]:
    """While it lasts, the layers of a model record how long each step of their calls takes.

    Args:
        model: a layer, a module that holds layers, a model of `load_model`, or layers by index.
            They must be on their devices before.
        capacity: spans that are kept, about ten a call of a layer.

    Raises:
        ConfigError: there is no layer, or one that is profiled already.
    """
    layers = _layers(model)
    if not layers:
        raise ConfigError(
            f"{type(model).__name__} holds no MoELayer and no DenseMLP; allowed: a layer, a model "
            "of load_model, or layers by their index"
        )
    busy = [index for index, layer in layers.items() if layer.spans is not None]
    if busy:
        raise ConfigError(f"layers {busy} are profiled already; allowed: one profile at a time")
    recorder = Recorder(_devices(layers), capacity)
    for index, layer in layers.items():
        layer.spans = LayerSpans(recorder, index, isinstance(layer, DenseMLP))
    try:
        yield Profile(layers, recorder)
    finally:
        for layer in layers.values():
            layer.spans = None


def _layers(model: nn.Module | Mapping[int, Layer]) -> dict[int, Layer]:
    if isinstance(model, Mapping):
        return dict(model)
    if not isinstance(model, nn.Module):
        return {}
    found: list[Layer] = []
    inside: set[int] = set()
    for module in model.modules():
        if isinstance(module, Layer) and id(module) not in inside:
            found.append(module)
            inside |= {id(part) for part in module.modules()}
    if found:
        return dict(enumerate(found))
    # Only a model of transformers needs this import, which brings in transformers.
    from exactmoe.hf import blocks

    return {index: layer for index, _, layer in blocks(model)}


def _devices(layers: Mapping[int, Layer]) -> set[torch.device]:
    found = {layer.device for layer in layers.values()}
    for layer in layers.values():
        if isinstance(layer, MoELayer) and layer.cards is not None:
            found |= set(layer.cards.devices)
    return found
