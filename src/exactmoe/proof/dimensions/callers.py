"""Callers: two Python threads that call the same layer of a GPU at once."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import torch
from torch import Tensor

from exactmoe.proof.batch import Batch
from exactmoe.proof.trial import Trial

_STREAM, _ROUNDS = 130, 10
_WIDTHS = (1, 33)


def callers(trial: Trial) -> None:
    """Both threads on the default stream, and each on a stream of its own."""
    device = trial.entry.layer.device
    if device.type != "cuda":
        trial.cannot_run("callers", f"calls of {device.type} run one after another")
        return
    for tokens in _WIDTHS:
        batches = [trial.random(tokens, _STREAM + caller) for caller in range(2)]
        expected = [trial.run(batch) for batch in batches]
        for own_streams in (False, True):
            torch.cuda.synchronize(device)
            with ThreadPoolExecutor(2) as pool:
                start = Barrier(2)
                calls = [
                    pool.submit(_caller, trial, batch, start, own_streams) for batch in batches
                ]
                found = [call.result() for call in calls]
            case = "streams of their own" if own_streams else "the default stream"
            for number, ys in enumerate(found):
                for y in ys:
                    where = f"thread {number} of 2, {case}"
                    trial.compare("callers", where, expected[number], y)


def _caller(trial: Trial, batch: Batch, start: Barrier, own_stream: bool) -> list[Tensor]:
    device = trial.entry.layer.device
    stream = torch.cuda.Stream(device) if own_stream else torch.cuda.default_stream(device)
    start.wait(timeout=60)
    with torch.cuda.stream(stream):
        ys = [trial.entry(batch) for _ in range(_ROUNDS)]
    stream.synchronize()
    return ys
