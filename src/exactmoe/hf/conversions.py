"""From a checkpoint's tensors, one set per expert, to the stacked parameters of an experts module.

transformers merges `experts.*.gate_proj.weight` and `experts.*.up_proj.weight` into
`experts.gate_up_proj`. The same merge, written beside it, takes their block scales to
`gate_up_proj_scale` and their global scales to `gate_up_proj_scale_2` [E, 2], or, where they are
divisors, to `gate_up_proj_global_scale` [E, 2]: gate and up keep their own.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from exactmoe.hf.adapter import ConversionOps, converter_names, converter_of, copy_converter

SCALE, GLOBAL_SCALE, DIVISOR = "_scale", "_scale_2", "_global_scale"
_EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
# Tensor beside `<projection>.weight`, or in its place -> suffix of the parameter that takes it.
# ModelOpt has weight_scale and weight_scale_2, compressed-tensors weight_packed, weight_scale and
# weight_global_scale, native DeepSeek-V4 scale, GLM's FP8 weight_scale_inv. The longest name first:
# transformers 5.17 ends no pattern at a name's border.
_BESIDE_WEIGHT = (
    ("weight_scale_2", GLOBAL_SCALE),
    ("weight_global_scale", DIVISOR),
    ("weight_packed", ""),
    ("weight_scale_inv", SCALE),
    ("weight_scale", SCALE),
    ("scale", SCALE),
)


class StackBlocks(ConversionOps):
    """Codes or block scales [N, K'] of each expert and projection -> [E, sum of N, K']."""

    @torch.no_grad()
    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **kwargs: Any,
    ) -> dict[str, Tensor]:
        stacked = [torch.stack(input_dict.pop(pattern)) for pattern in source_patterns]
        return {target_patterns[0]: stacked[0] if len(stacked) == 1 else torch.cat(stacked, dim=1)}


class StackScalars(ConversionOps):
    """Global scales, [] or [1], of each expert and projection -> float32 [E, projections]."""

    @torch.no_grad()
    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **kwargs: Any,
    ) -> dict[str, Tensor]:
        columns = [
            torch.stack([t.reshape(()) for t in input_dict.pop(pattern)])
            for pattern in source_patterns
        ]
        return {target_patterns[0]: torch.stack(columns, dim=1)}


class Single(ConversionOps):
    """One tensor as it is, except that a global scale stored as [1] becomes []."""

    @torch.no_grad()
    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **kwargs: Any,
    ) -> dict[str, Tensor]:
        (value,) = input_dict.pop(source_patterns[0])
        return {target_patterns[0]: value.reshape(()) if value.shape == (1,) else value}


def scale_converters(conversions: list[Any]) -> list[Any]:
    """Converters for scales and codes of the weights that `conversions` merge. They go first."""
    added = []
    for beside, suffix in _BESIDE_WEIGHT:
        for converter in conversions:
            sources, targets = converter_names(converter)
            if not targets or not targets[0].endswith(_EXPERTS):
                continue
            names = [source.removesuffix("weight") + beside for source in sources]
            operation = StackScalars() if suffix in (GLOBAL_SCALE, DIVISOR) else StackBlocks()
            added.append(copy_converter(converter, names, targets[0] + suffix, [operation]))
    for name in ("gate_proj", "up_proj", "down_proj"):
        shared, dense = f"shared_experts.{name}", f"mlp.{name}"
        for source, target in (
            (f"{name}.weight_scale_2", f"{name}.weight_scale_2"),
            (f"{name}.weight_global_scale", f"{name}.weight_global_scale"),
            (f"{name}.weight_packed", f"{name}.weight"),
            (f"{name}.weight_scale_inv", f"{name}.weight_scale"),
            (f"{shared}.scale", f"{shared}.weight_scale"),
            (f"{dense}.scale", f"{dense}.weight_scale"),
        ):
            added.append(converter_of([source], target, [Single()]))
    return added


def linear_converters(suffixes: Mapping[str, str]) -> list[Any]:
    """Converters for the scales of linear modules: name of the module in the model -> last part of
    the scales' names, once transformers renamed the module. They go first.
    """
    pairs = {
        (_in_layer(module) + suffix, _in_layer(module) + f".weight{SCALE}")
        for module, suffix in suffixes.items()
    }
    renamed = sorted(pair for pair in pairs if pair[0] != pair[1])
    return [converter_of([source], target, [Single()]) for source, target in renamed]


def _in_layer(module: str) -> str:
    """A module's name without its decoder layer: all layers share a converter."""
    return re.sub(r"^.*\blayers\.\d+\.", "", module)
