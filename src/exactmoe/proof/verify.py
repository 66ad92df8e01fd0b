"""verify: proof, on this machine, that a layer gives a token one bit pattern (docs/numerics.md).

On the CPU the definition itself is compared byte by byte. The dots of a GPU have the order of its
matrix instruction: there the paths are compared with each other, everything but the dots with the
reference, and the dots with float64.
"""

import time
from collections.abc import Callable, Iterable, Sequence

from exactmoe.dense import DenseMLP
from exactmoe.errors import ConfigError
from exactmoe.layer import MoELayer
from exactmoe.proof.batch import entries
from exactmoe.proof.dimensions import DIMENSIONS, not_over_ranks
from exactmoe.proof.machine import fingerprint
from exactmoe.proof.report import Report
from exactmoe.proof.trial import Trial

# They cross every border of a tile that a kernel may have, from both sides.
WIDTHS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 257, 1000)
# Of a GPU's layer: wider tiles, and the widths of a prefill.
GPU_WIDTHS = (*WIDTHS, 255, 256, 511, 513, 2049, 4096, 8192)


def verify(
    layer: MoELayer | DenseMLP,
    *,
    widths: Iterable[int] | None = None,
    seed: int = 0,
    repeats: int = 20,
    backend_rows: int = 2,
    dimensions: Sequence[str] | None = None,
    subject: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Compare the bytes of a layer's results over everything that may not change them.

    Both entries of a MoE layer are proved: the whole block (router, experts, shared expert) and
    `layer.experts`. The layer is used as it is, and left as it was.

    Args:
        layer: a MoELayer or DenseMLP, of any device and backend.
        widths: tokens a call; None: WIDTHS, and up to 8192 tokens where a GPU path runs.
        seed: chooses the inputs; they come from an integer hash, so they are the same everywhere.
        repeats: how often one call is repeated.
        backend_rows: tokens compared with the reference backend of the CPU, which is slow.
        dimensions: names from proof/dimensions; None: all of them.
        subject: what the report calls the layer.
        progress: called with the name of each dimension before it runs.

    Returns:
        A Report: rows and bytes compared in each dimension, the first difference of each, errors
        of a GPU's dots against float64, what could not run here and why, `ok`.
        It does not raise on a mismatch; `report.raise_on_mismatch()` does.

    Raises:
        ConfigError: no layer, no width, or a dimension that does not exist.
        BitMismatch: y has another shape or dtype than its call asks for.
    """
    if not isinstance(layer, MoELayer | DenseMLP):
        raise ConfigError(f"layer is {type(layer).__name__}; allowed: MoELayer, DenseMLP")
    if widths is None:
        widths = GPU_WIDTHS if layer.device.type == "cuda" else WIDTHS
    ascending = _checked_widths(widths)
    chosen = _checked_dimensions(dimensions)
    if repeats < 1 or backend_rows < 1:
        raise ConfigError(f"repeats is {repeats}, backend_rows {backend_rows}; allowed: from 1")
    start = time.perf_counter()
    report = Report(subject or type(layer).__name__, machine=fingerprint(layer.device))
    for entry in entries(layer):
        trial = Trial(entry, report, ascending, seed, repeats, backend_rows)
        for name in chosen:
            if progress is not None:
                progress(f"{report.subject}: {entry.name}, {name}")
            begin = time.perf_counter()
            reason = not_over_ranks(layer, name)
            if reason is None:
                DIMENSIONS[name](trial)
            else:
                trial.cannot_run(name, reason)
            took = time.perf_counter() - begin
            report.times[name] = report.times.get(name, 0.0) + took
    report.seconds = time.perf_counter() - start
    return report


def _checked_widths(widths: Iterable[int]) -> tuple[int, ...]:
    asked = tuple(widths)
    if not asked or any(type(width) is not int or width < 1 for width in asked):
        raise ConfigError(f"widths are {asked}; allowed: at least one, each an integer from 1")
    return tuple(sorted(set(asked)))


def _checked_dimensions(names: Sequence[str] | None) -> list[str]:
    unknown = [name for name in names or () if name not in DIMENSIONS]
    if unknown:
        raise ConfigError(f"dimensions {unknown} do not exist; allowed: {', '.join(DIMENSIONS)}")
    return [name for name in DIMENSIONS if names is None or name in names]
