"""Width: a token alone, and the same token as every row of a wider call."""

from exactmoe.proof.trial import Trial


def width(trial: Trial) -> None:
    """Row 0 of each width against the needle alone; neighbours are copies, so only T differs."""
    for needle in range(len(trial.needles)):
        alone = trial.copies(needle, 1)
        for tokens in trial.widths:
            row = trial.copies(needle, tokens)[:1]
            trial.compare("width", "", alone, row, width=tokens)
