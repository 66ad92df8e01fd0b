"""Pieces: how many tokens the workspace holds (Limits.max_rows), and so where a call is cut."""

from exactmoe.proof.trial import Trial

SIZES = (1, 3, 16, 100)
_STREAM, _MOST_TOKENS = 50, 129


def pieces(trial: Trial) -> None:
    """One call in pieces of other sizes, and an `out=` that held NaN, against the call as it is."""
    layer = trial.entry.layer
    batch = trial.random(min(_MOST_TOKENS, max(trial.widths)), _STREAM)
    expected = trial.run(batch)
    before = layer.max_rows
    try:
        for size in SIZES:
            layer.reserve(size)
            trial.compare("pieces", f"max_rows {size}", expected, trial.run(batch))
    finally:
        layer.reserve(before)
    if layer.device.type == "cuda":
        _one_piece(trial)
    out = trial.empty(batch.width).fill_(float("nan"))
    trial.compare("pieces", "into out=", expected, trial.run(batch, out))


def _one_piece(trial: Trial) -> None:
    """The widest call in one piece: tiles and offsets of a prefill, however small max_rows is."""
    layer = trial.entry.layer
    tokens, before = max(trial.widths), layer.max_rows
    if tokens <= before:
        return
    batch = trial.random(tokens, _STREAM + 1)
    expected = trial.run(batch)
    try:
        layer.reserve(tokens)
        trial.compare("pieces", f"max_rows {tokens}", expected, trial.run(batch))
    finally:
        layer.reserve(before)
