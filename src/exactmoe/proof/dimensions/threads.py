"""Threads: how many the CPU works with."""

import torch

from exactmoe.proof.trial import Trial

COUNTS = (1, 2, 3)
_STREAM = 80
_WIDTHS = (1, 33)


def threads(trial: Trial) -> None:
    """torch's thread count, which the CPU backend follows unless EXACTMOE_THREADS fixes it."""
    device = trial.entry.layer.device
    if device.type != "cpu":
        trial.cannot_run("threads", f"torch's threads compute nothing on {device.type}")
        return
    before = torch.get_num_threads()
    for tokens in _WIDTHS:
        batch = trial.random(tokens, _STREAM)
        expected = trial.run(batch)
        try:
            for count in COUNTS:
                torch.set_num_threads(count)
                trial.compare("threads", f"{count} threads", expected, trial.run(batch))
        finally:
            torch.set_num_threads(before)
