"""Position: where a token stands in its call."""

from exactmoe.proof.trial import Trial


def position(trial: Trial) -> None:
    """Every row of a call of copies against row 0 of the same call: only the position differs."""
    for needle in range(len(trial.needles)):
        for tokens in trial.widths:
            rows = trial.copies(needle, tokens)
            if tokens > 1:
                first = rows[:1].expand(tokens - 1, -1)
                trial.compare("position", "", first, rows[1:], width=tokens, first_token=1)
