"""Repeats: the same call again and again."""

from exactmoe.proof.trial import Trial

_STREAM = 40
_WIDTHS = (1, 5, 64)


def repeats(trial: Trial) -> None:
    """One pattern each time; each y is memory of its own, so the first keeps its bytes."""
    other = trial.random(max(_WIDTHS), _STREAM + 1)
    for tokens in _WIDTHS:
        batch = trial.random(tokens, _STREAM)
        expected = trial.run(batch)
        kept = expected.clone()
        for _ in range(trial.repeats):
            trial.compare("repeats", "", kept, trial.run(batch))
        trial.run(other)
        trial.compare("repeats", "y of the first call, after the others", kept, expected)
