"""Experts quantised while a bf16 checkpoint is read: one at a time, before they are stacked.

What a layer needs at once is its packed experts and one projection of one expert in bfloat16 and
float32. Where a checkpoint stores all experts of a layer in one tensor, that tensor is read in
bfloat16 and quantised expert by expert.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from exactmoe.errors import ConfigError
from exactmoe.formats import BLOCK, quantize
from exactmoe.hf.adapter import ConversionOps
from exactmoe.hf.conversions import GLOBAL_SCALE, SCALE

# Format -> dtypes of codes and block scales, as parameters and files hold them.
DTYPES = {
    "nvfp4": (torch.uint8, torch.float8_e4m3fn),
    "mxfp4": (torch.int8, torch.float8_e8m0fnu),
}
_PROJECTIONS = {"gate_up_proj": 2, "down_proj": 1}
PARAMETERS = tuple(_PROJECTIONS)


class Stack:
    """The packed experts of one parameter, filled one by one.

    Args:
        shape: of the bf16 parameter, [E, N, K]; gate_up_proj has the rows of gate, then of up.
        projections: how many lie below each other in N.
        format: "nvfp4" or "mxfp4".
        rule: how scales are chosen; None: the publisher's.
    """

    def __init__(
        self, shape: tuple[int, ...], projections: int, format: str, rule: str | None
    ) -> None:
        self.format, self.rule, self.projections = format, rule, projections
        experts, rows, columns = shape
        self.rows = rows // projections
        self.columns = columns
        self.codes = torch.empty(experts, rows, columns // 2, dtype=torch.uint8)
        self.scales = torch.empty(experts, rows, columns // BLOCK[format], dtype=torch.uint8)
        self.global_scale = torch.empty(experts, projections) if format == "nvfp4" else None

    def put(self, expert: int, projection: int, weight: Tensor) -> None:
        """Quantise one projection [N, K] of one expert into its place."""
        if tuple(weight.shape) != (self.rows, self.columns):
            raise ConfigError(f"it is {tuple(weight.shape)}; allowed: {(self.rows, self.columns)}")
        packed = quantize(weight[None], self.format, self.rule)
        rows = slice(projection * self.rows, (projection + 1) * self.rows)
        if expert == projection == 0:
            self._move(weight.device)
        self.codes[expert, rows] = packed.codes[0]
        self.scales[expert, rows] = packed.scales[0]  # type: ignore[index]
        if self.global_scale is not None and packed.global_scale is not None:
            self.global_scale[expert, projection] = packed.global_scale[0]

    def _move(self, device: torch.device) -> None:
        self.codes, self.scales = self.codes.to(device), self.scales.to(device)
        if self.global_scale is not None:
            self.global_scale = self.global_scale.to(device)

    def parameters(self, name: str) -> dict[str, Tensor]:
        """The parameters, by names that start with `name`."""
        codes, scales = DTYPES[self.format]
        found = {name: self.codes.view(codes), name + SCALE: self.scales.view(scales)}
        return (
            found if self.global_scale is None else found | {name + GLOBAL_SCALE: self.global_scale}
        )


class _Operation(ConversionOps):
    """An operation of a quantizer; transformers copies converters, and the copies share it."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Operation":
        return self


class QuantizeExperts(_Operation):
    """Operation of a lazy converter: tensors of single experts to the packed parameters."""

    @torch.no_grad()
    def convert(
        self,
        input_dict: dict[str, list[Callable[[], Tensor]]],
        source_patterns: list[str],
        target_patterns: list[str],
        full_layer_name: str = "",
        model: Any = None,
        **kwargs: Any,
    ) -> dict[str, Tensor]:
        shape = tuple(model.get_parameter(full_layer_name).shape)
        stack = self.owner.stack(shape, len(source_patterns))
        for projection, pattern in enumerate(source_patterns):
            readers = input_dict.pop(pattern, [])
            with self.owner.problem(f"{full_layer_name}, {pattern}"):
                if len(readers) != shape[0]:
                    raise ConfigError(f"{len(readers)} experts; allowed: {shape[0]}")
            for expert, read in enumerate(readers[: shape[0]]):
                with self.owner.problem(f"{full_layer_name}, {pattern.replace('*', str(expert))}"):
                    stack.put(expert, projection, read())
        return stack.parameters(target_patterns[0])


class QuantizeStacked(_Operation):
    """Operation after the others: a parameter that came stacked to the packed parameters."""

    @torch.no_grad()
    def convert(
        self, input_dict: dict[str, Any], full_layer_name: str = "", **kwargs: Any
    ) -> dict[str, Any]:
        if len(input_dict) > 1:
            return input_dict  # packed already, one by one
        (value,) = input_dict.values()
        weight = value[0] if isinstance(value, list) else value
        projections = _PROJECTIONS[full_layer_name.rpartition(".")[2]]
        stack = self.owner.stack(tuple(weight.shape), projections)
        for expert, rows in enumerate(weight):
            for projection, part in enumerate(rows.chunk(projections)):
                with self.owner.problem(f"{full_layer_name}, expert {expert}"):
                    stack.put(expert, projection, part)
        return stack.parameters(full_layer_name)


def declare(module: nn.Module, name: str, format: str, packed: bool) -> None:
    """Give an experts module, on the meta device, the parameters that packed experts need.

    Where they are quantised at load (not `packed`), the codes come in the place of the bfloat16
    parameter: transformers reads tensors in the dtype of the parameter that takes them.
    """
    *lead, columns = getattr(module, name).shape
    codes, scales = DTYPES[format]
    if packed:
        _register(module, name, (*lead, columns // 2), codes)
    _register(module, name + SCALE, (*lead, columns // BLOCK[format]), scales)
    if format == "nvfp4":
        _register(module, name + GLOBAL_SCALE, (lead[0], _PROJECTIONS[name]), torch.float32)


def _register(module: nn.Module, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    empty = torch.empty(shape, dtype=dtype, device="meta")
    module.register_parameter(name, nn.Parameter(empty, requires_grad=False))
