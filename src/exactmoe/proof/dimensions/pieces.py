"""Pieces: how many tokens the workspace holds (Limits.max_rows), and so where a call is cut."""

from exactmoe.proof.trial import Trial

SIZES = (1, 3, 16, 100)
_STREAM, _MOST_TOKENS = 50, 129


def pieces(trial: Trial) -> None:
    """One call in pieces of other sizes, and an `out=` that held NaN, against the call as it is."""
    layer = trial.entry.layer
    batch = trial.random(min(_MOST_TOKENS, max(trial.widths)), _STREAM)
    expected = trial.run(batch)
    before = layer.limits.max_rows
    try:
        for size in SIZES:
            layer.reserve(size)
            trial.compare("pieces", f"max_rows {size}", expected, trial.run(batch))
    finally:
        layer.reserve(before)
    out = trial.empty(batch.width).fill_(float("nan"))
    trial.compare("pieces", "into out=", expected, trial.run(batch, out))
