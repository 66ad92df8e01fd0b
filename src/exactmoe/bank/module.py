"""ExactModule: a torch module whose buffers may move but never change type.

`model.to(torch.bfloat16)` must not narrow a router's bias or a global scale (field fault A16), and
a state dict of another
dtype must not be cast on the way in.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Self

from torch import Tensor, nn

from exactmoe.errors import ConfigError
from exactmoe.formats import PackedWeight

_PARTS = ("codes", "scales", "global_scale")


class ExactModule(nn.Module):
    """Base of all that holds weights here. Subclasses register buffers and packed weights."""

    def __init__(self) -> None:
        super().__init__()
        self._packed_meta: dict[str, tuple[str, str]] = {}
        self._packed_cache: dict[str, PackedWeight] = {}
        self._prepared: dict[tuple[str, str], Any] = {}

    def register_packed(self, name: str, weight: PackedWeight) -> None:
        """Register a packed weight: its tensors become the buffers `name_codes`, `name_scales`,
        `name_global_scale`.
        """
        weight = _detached(weight)
        for part in _PARTS:
            self.register_buffer(f"{name}_{part}", getattr(weight, part))
        self._packed_meta[name] = (weight.format, weight.global_scale_op)
        self._packed_cache[name] = weight

    def packed(self, name: str) -> PackedWeight:
        """The packed weight over the buffers as they are now."""
        if name not in self._packed_cache:
            format, global_scale_op = self._packed_meta[name]
            parts = {part: getattr(self, f"{name}_{part}") for part in _PARTS}
            self._packed_cache[name] = PackedWeight(
                format=format, global_scale_op=global_scale_op, **parts
            )
        return self._packed_cache[name]

    def prepared(self, name: str, backend: str, prepare: Callable[[PackedWeight], Any]) -> Any:
        """What a backend's `prepare` makes of a packed weight, once until the buffers change."""
        key = (name, backend)
        if key not in self._prepared:
            self._prepared[key] = prepare(self.packed(name))
        return self._prepared[key]

    def _forget(self) -> None:
        self._packed_cache.clear()
        self._prepared.clear()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def keep_dtype(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        self._forget()
        return super()._apply(keep_dtype, recurse)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        for name, buffer in self.named_buffers(recurse=False):
            given = state_dict.get(prefix + name)
            if isinstance(given, Tensor) and given.dtype != buffer.dtype:
                raise ConfigError(
                    f"{prefix + name} is {given.dtype} in the state dict; allowed: {buffer.dtype}"
                )
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self._forget()
        for name in self._packed_meta:
            self.packed(name)  # checks the values

    def __getstate__(self) -> dict[str, Any]:
        # Caches point into live memory: a copy or an unpickled module makes its own.
        return {**self.__dict__, "_packed_cache": {}, "_prepared": {}}


def _detached(weight: PackedWeight) -> PackedWeight:
    """The same memory outside autograd: a model's parameters may require gradients."""
    codes, scales, global_scale = weight.codes, weight.scales, weight.global_scale
    if not any(t is not None and t.requires_grad for t in (codes, scales, global_scale)):
        return weight
    return replace(
        weight,
        codes=codes.detach(),
        scales=None if scales is None else scales.detach(),
        global_scale=None if global_scale is None else global_scale.detach(),
    )
