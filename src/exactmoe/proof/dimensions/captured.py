"""Captured: CUDA graph replays against eager calls (field fault A25)."""

from dataclasses import replace

import torch

from exactmoe.proof.batch import Batch
from exactmoe.proof.trial import Trial
from exactmoe.runtime.workspace import arena, captures_alive, release_captures

_STREAM = 140
_WIDTHS = (1, 4, 8, 64, 300)


def captured(trial: Trial) -> None:
    """One capture a width; replays with the captured inputs and with others copied over them.

    Of `layer.experts` also all tokens to one expert, and all absent: nothing of the routing may be
    fixed by the capture.
    """
    layer = trial.entry.layer
    if layer.device.type != "cuda":
        trial.cannot_run("captured", f"{layer.device.type} has no CUDA graphs")
        return
    if layer.limits.checks:
        trial.cannot_run("captured", "limits.checks reads the fault word after every call")
        return
    graphs_of_others = captures_alive(layer.device)
    for tokens in sorted({*_WIDTHS, max(trial.widths)}):
        _one_width(trial, tokens)
    if not graphs_of_others:
        release_captures(layer.device)  # ours are gone; later dimensions may reserve


def _one_width(trial: Trial, tokens: int) -> None:
    first, second = (trial.random(tokens, _STREAM + number) for number in range(2))
    batches = {"its own inputs": first, "other inputs": second, **_extremes(second)}
    expected = {name: trial.run(batch) for name, batch in batches.items()}
    static = first.map(torch.clone)
    stream = torch.cuda.Stream(first.x.device)
    stream.wait_stream(torch.cuda.current_stream(first.x.device))
    with torch.cuda.stream(stream):
        trial.entry(static)  # kernels and the stream's workspace are there before the capture
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        y = trial.entry(static)
        held = arena(first.x.device)
    for turn in ("first", "second"):
        for name, batch in batches.items():
            for part, given in batch.tensors().items():
                static.tensors()[part].copy_(given)
            held.fill(0xFF)  # what the graph's workspace held must not show
            y.fill_(float("nan"))
            graph.replay()
            case = f"{turn} replay with {name}"
            trial.compare("captured", case, expected[name], y)


def _extremes(batch: Batch) -> dict[str, Batch]:
    ids = batch.expert_ids
    if ids is None:
        return {}
    return {
        "all tokens to one expert": replace(batch, expert_ids=torch.zeros_like(ids)),
        "all ids absent": replace(batch, expert_ids=torch.full_like(ids, -1)),
    }
