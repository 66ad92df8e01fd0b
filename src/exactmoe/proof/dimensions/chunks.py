"""Chunks: tokens as one call, and cut as decode, speculative verify and prefill cut them."""

import torch

from exactmoe.proof.trial import Trial

SIZES = (1, 2, 3, 5, 8, 64)
_STREAM, _MOST_TOKENS = 20, 300


def chunks(trial: Trial) -> None:
    """All rows of one call against the same tokens in calls of each size."""
    tokens = min(_MOST_TOKENS, max(trial.widths))
    batch = trial.random(tokens, _STREAM)
    whole = trial.run(batch)
    for size in SIZES:
        if size > tokens:
            continue
        parts = [trial.run(batch.rows(slice(at, at + size))) for at in range(0, tokens, size)]
        trial.compare("chunks", f"{tokens} tokens by {size}", whole, torch.cat(parts))
