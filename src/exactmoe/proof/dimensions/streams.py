"""Streams: two CUDA streams that run calls of the same layer at once."""

import torch

from exactmoe.proof.trial import Trial

_STREAM, _ROUNDS = 120, 5
_WIDTHS = (1, 33, 300)


def streams(trial: Trial) -> None:
    """Calls on two streams with no wait between them, against the same calls one by one."""
    device = trial.entry.layer.device
    if device.type != "cuda":
        trial.cannot_run("streams", f"{device.type} has one stream only")
        return
    current = torch.cuda.current_stream(device)
    sides = [torch.cuda.Stream(device) for _ in range(2)]
    for tokens in _WIDTHS:
        batches = [trial.random(tokens, _STREAM + side) for side in range(2)]
        expected = [trial.run(batch) for batch in batches]
        found = []
        for side in sides:
            side.wait_stream(current)
        for _ in range(_ROUNDS):
            for number, side in enumerate(sides):
                with torch.cuda.stream(side):
                    found.append((number, trial.entry(batches[number])))
        torch.cuda.synchronize(device)
        for number, y in found:
            trial.compare("streams", f"stream {number} of 2", expected[number], y)
