"""Backend: every other path of the layer's device that must have its bits.

On the CPU that is the reference, which is the definition. On a GPU it is the portable path beside
the fast one; what they compute is held against the reference in the dimension "stages".
"""

from exactmoe.proof.backends import CPU_BACKENDS, canonical_twin, gpu_order, paths_of, using
from exactmoe.proof.batch import Entry
from exactmoe.proof.trial import Trial

_STREAM = 90
_WIDTHS = (1, 8, 65, 300)


def backend(trial: Trial) -> None:
    """A few tokens on every backend, against the reference; more of them on a GPU's paths."""
    if gpu_order(trial.entry.layer):
        _paths_of_a_gpu(trial)
        return
    batch = trial.random(trial.backend_rows, _STREAM)
    layer = trial.entry.layer
    before = layer.backend
    with using(layer, "reference"):
        expected = trial.run(batch)
    for name in (before, *(b for b in CPU_BACKENDS if b not in ("reference", before))):
        with using(layer, name):
            used = layer.plan().backend
            if used != "reference":
                trial.compare("backend", f"{used} against reference", expected, trial.run(batch))


def _paths_of_a_gpu(trial: Trial) -> None:
    layer = trial.entry.layer
    used, *others = paths_of(layer)
    if not others:
        trial.cannot_run("backend", f"{used} is the only path of this layer on {layer.device}")
        return
    for name in others:
        twin = Entry(trial.entry.name, canonical_twin(layer, name))
        for tokens in _WIDTHS:
            batch = trial.random(tokens, _STREAM)
            case = f"{name} against {used}"
            trial.compare("backend", case, trial.run(batch), twin(batch))
