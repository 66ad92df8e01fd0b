"""Model families: config.json -> layer specs, tensor names and ignore rules; one file per family.

A new family is one file with MODEL_TYPES, PREFIXES, NUMERICS and family(), and its name below.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from types import ModuleType
from typing import Any

from exactmoe.config import Numerics
from exactmoe.errors import CheckpointError, Unsupported
from exactmoe.families import deepseek_v4, glm5_next
from exactmoe.families.spec import (
    MTP_RULE,
    PROJECTIONS,
    STACKED_PROJECTIONS,
    Family,
    IgnoreRule,
    LayerSpec,
    TensorNames,
)

_MODULES: dict[str, ModuleType] = {
    model_type: module for module in (deepseek_v4, glm5_next) for model_type in module.MODEL_TYPES
}
MODEL_TYPES = tuple(_MODULES)
# Known models that are not run, and why.
REFUSED_MODEL_TYPES = {
    "gpt_oss": "its rows of gate and up are interleaved, its projections have biases, and its "
    "activation is (up + 1) x gate x sigmoid(1.702 gate), none of which runs here",
}


def family_of(
    config: Mapping[str, Any],
    tensor_names: Collection[str] | None = None,
    numerics: Numerics | str | None = None,
) -> Family:
    """The family of a model.

    Args:
        config: config.json as a dict.
        tensor_names: of the checkpoint; they decide what stands before "layers." in its names, and
            which multi-token prediction layers there are. None: as published.
        numerics: None: the family's class (glm5_next a16, deepseek_v4 a8).

    Raises:
        Unsupported: an unknown model_type, or a config value that no path here can run.
        ConfigError: a missing or malformed config value.
        CheckpointError: the tensor names have none of the family's prefixes, or several.
    """
    model_type = config.get("model_type")
    if model_type in REFUSED_MODEL_TYPES:
        raise Unsupported(f"model_type is {model_type!r}: {REFUSED_MODEL_TYPES[model_type]}")
    if model_type not in _MODULES:
        raise Unsupported(f"model_type is {model_type!r}; allowed: {', '.join(MODEL_TYPES)}")
    module = _MODULES[model_type]
    prefix = module.PREFIXES[0]
    if tensor_names is not None:
        prefix = _prefix(module.PREFIXES, tensor_names, model_type)
    chosen = Numerics.of(module.NUMERICS if numerics is None else numerics)
    family: Family = module.family(config, prefix, chosen, tensor_names)
    return family


def _prefix(known: tuple[str, ...], tensor_names: Iterable[str], model_type: str) -> str:
    pattern = re.compile("(" + "|".join(map(re.escape, known)) + r")layers\.\d+\.")
    found = {match[1]: name for name in tensor_names if (match := pattern.match(name))}
    if len(found) != 1:
        names = " and ".join(found.values()) or f"no tensor of a {model_type} layer"
        allowed = ", ".join(f"{prefix}layers.0..." for prefix in known)
        raise CheckpointError(f"the checkpoint has {names}; allowed: exactly one of {allowed}")
    return next(iter(found))


__all__ = [
    "MODEL_TYPES",
    "MTP_RULE",
    "PROJECTIONS",
    "REFUSED_MODEL_TYPES",
    "STACKED_PROJECTIONS",
    "Family",
    "IgnoreRule",
    "LayerSpec",
    "TensorNames",
    "family_of",
]
