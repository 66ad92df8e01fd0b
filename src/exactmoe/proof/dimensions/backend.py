"""Backend: the reference, which is the definition, against each other path that this device has."""

from exactmoe.plan.choose import BACKENDS
from exactmoe.proof.trial import Trial

_STREAM = 90


def backend(trial: Trial) -> None:
    """A few tokens on every backend, against the reference."""
    batch = trial.random(trial.backend_rows, _STREAM)
    layer = trial.entry.layer
    before = layer.backend
    try:
        layer.backend = "reference"
        expected = trial.run(batch)
        for name in (before, *(b for b in BACKENDS if b not in ("reference", before))):
            layer.backend = name
            used = layer.plan().backend
            if used != "reference":
                trial.compare("backend", f"{used} against reference", expected, trial.run(batch))
    finally:
        layer.backend = before
