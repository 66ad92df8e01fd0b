"""Chunks: tokens as one call, and cut as decode, speculative verify and prefill cut them."""

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
        for start in range(0, tokens, size):
            rows = slice(start, start + size)
            case = f"{tokens} tokens by {size}, from token {start}"
            trial.compare("chunks", case, whole[rows], trial.run(batch.rows(rows)))
