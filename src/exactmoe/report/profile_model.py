"""Profile a loaded model: calls of several widths over a text, eager, and captured on a GPU."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exactmoe.errors import ConfigError
from exactmoe.report.profile import Layer, Profile, profile
from exactmoe.runtime.workspace import release_captures

REPLAYS = 30
Call = Callable[[], Any]


@dataclass(frozen=True)
class ModelProfile:
    """What was found.

    Attributes:
        name: of the model.
        machine: its fingerprint.
        profiled: spans of its MLP layers.
        model_us: width -> microseconds of a forward call of the whole model, median: attention and
            norms included, without a cache.
    """

    name: str
    machine: Mapping[str, Any]
    profiled: Profile
    model_us: dict[int, float]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        whole = {str(width): us for width, us in self.model_us.items()}
        found = self.profiled.to_dict()
        return {"path": self.name, "machine": dict(self.machine), **found, "model_us": whole}


@dataclass(frozen=True)
class Running:
    """A model that can be run.

    Attributes:
        name: of the model.
        machine: fingerprint of where it runs.
        layers: index -> its MLP layers.
        forward: runs token ids int64 [1, T] through the model.
        recording: a context manager that gives a list, to which a call of each layer that runs
            meanwhile is added, as something that runs the same call of the layer again.
    """

    name: str
    machine: Mapping[str, Any]
    layers: Mapping[int, Layer]
    forward: Callable[[Tensor], Any]
    recording: Callable[[], AbstractContextManager[Sequence[Call]]]


def profile_model(
    model: Running,
    ids: Tensor,
    widths: Sequence[int],
    calls: int,
    say: Callable[[str], None] = lambda text: None,
) -> ModelProfile:
    """Run windows of a text through a model, and read how long each step of its layers takes.

    Args:
        model: what runs.
        ids: int64 [1, N] of a text; windows start anew at its end.
        widths: tokens a call.
        calls: for each width; one more runs before, for what compiles at first.
        say: called with a line for each width.

    Raises:
        ConfigError: a width or a count below 1, or a width that the text is too short for.
    """
    if calls < 1 or not widths or not 1 <= min(widths) <= max(widths) <= ids.shape[1]:
        raise ConfigError(
            f"widths are {tuple(widths)} and calls {calls}, the text has {ids.shape[1]} tokens; "
            "allowed: from 1, and widths up to the length of the text"
        )
    device = next(iter(model.layers.values())).device
    passes: list[Sequence[Call]] = []
    for width in widths:
        say(f"{width} tokens a call: a first call, for what compiles")
        with model.recording() as recorded:
            model.forward(ids[:, :width])
        passes.append(recorded)
    model_us = {}
    with profile(model.layers) as profiled:
        for width in widths:
            say(f"{width} tokens a call: {calls} calls")
            times = []
            for window in _windows(ids, width, calls):
                start = _now(device)
                model.forward(window)
                times.append(1e6 * (_now(device) - start))
            model_us[width] = statistics.median(times)
        if device.type == "cuda":
            say("captured graphs")
            _replay(profiled, passes, device)
    return ModelProfile(model.name, model.machine, profiled, model_us)


def _windows(ids: Tensor, width: int, calls: int) -> Iterator[Tensor]:
    """Consecutive windows of a text, from its start again where it ends."""
    fitting = ids.shape[1] // width
    for number in range(calls):
        first = number % fitting * width
        yield ids[:, first : first + width]


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _replay(profiled: Profile, passes: Sequence[Sequence[Call]], device: torch.device) -> None:
    """One graph of all layers for each width, over what entered them, replayed and sampled."""
    graphs = []
    with torch.cuda.device(device), torch.no_grad():
        for calls in passes:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for call in calls:
                    call()
            graphs.append(graph)
        for _ in range(REPLAYS):
            for graph in graphs:
                graph.replay()
            profiled.sample_graphs()
        torch.cuda.synchronize()
    graphs.clear()
    release_captures(device)
