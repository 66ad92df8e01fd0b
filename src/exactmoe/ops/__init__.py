"""Host side of the ops: one set of them a backend, found by its name."""

from exactmoe.ops.cpu_path import CpuPath
from exactmoe.ops.path import Path
from exactmoe.ops.reference_path import ReferencePath

_PATHS: dict[str, Path] = {"cpu": CpuPath(), "reference": ReferencePath()}


def path(name: str) -> Path:
    """The path of a backend that `plan.choose` named."""
    return _PATHS[name]


__all__ = ["Path", "path"]
