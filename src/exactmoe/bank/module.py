"""ExactModule: a torch module whose buffers may move but never change type.

`model.to(torch.bfloat16)` must not narrow a router's bias or a global scale (field fault A16), and
a state dict of another
dtype must not be cast on the way in. What is derived from buffers is made again when they change.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from exactmoe.errors import ConfigError, Unsupported
from exactmoe.formats import PackedWeight
from exactmoe.runtime.devices import capturing

_PARTS = ("codes", "scales", "global_scale")


# Of each buffer: name, tensor, address, version (None: made in inference mode, it has no version).
# Every operation that torch counts raises the version, those that change a shape in place too.
Seen = list[tuple[str, Tensor | None, int, int | None]]


class ExactModule(nn.Module):
    """Base of all that holds weights here. Subclasses register buffers and packed weights.

    A buffer may be changed in place (`gate_scales.add_(1)`), exchanged or loaded between calls:
    the next call sees it. A write that torch does not count (through `.data`, numpy or shared
    memory) is seen after `refresh()`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._packed_meta: dict[str, tuple[str, str]] = {}
        self._packed_cache: dict[str, tuple[Seen, PackedWeight]] = {}
        self._prepared: dict[tuple[str, str], tuple[PackedWeight, Any]] = {}

    def register_packed(self, name: str, weight: PackedWeight) -> None:
        """Register a packed weight: its tensors become the buffers `name_codes`, `name_scales`,
        `name_global_scale`.
        """
        weight = _detached(weight)
        for part in _PARTS:
            self.register_buffer(f"{name}_{part}", getattr(weight, part))
        self._packed_meta[name] = (weight.format, weight.global_scale_op)
        self._packed_cache[name] = (self._seen(_part_names(name)), weight)

    def packed(self, name: str) -> PackedWeight:
        """The packed weight over the buffers as they are now."""
        return self._stored(name)

    def _stored(self, name: str) -> PackedWeight:
        kept = self._packed_cache.get(name)
        if kept is None or self._changed(kept[0]):
            self._require_eager(f"{name} is read")
            format, global_scale_op = self._packed_meta[name]
            seen = self._seen(_part_names(name))
            parts = {part: getattr(self, f"{name}_{part}") for part in _PARTS}
            kept = seen, PackedWeight(format=format, global_scale_op=global_scale_op, **parts)
            self._packed_cache[name] = kept
        return kept[1]

    def prepared(self, name: str, backend: str, prepare: Callable[[PackedWeight], Any]) -> Any:
        """What a backend's `prepare` makes of a packed weight, once until the buffers change.

        Raises:
            Unsupported: the backend cannot read it; the message begins with `name`.
        """
        weight = self._stored(name)
        kept = self._prepared.get((name, backend))
        if kept is None or kept[0] is not weight:
            self._require_eager(f"{name} is prepared for backend {backend!r}")
            try:
                kept = weight, prepare(weight)
            except Unsupported as error:
                raise Unsupported(f"{name}: {error.reason}") from error
            if weight.device.type == "cuda":
                # Calls on other streams read it too, without waiting for this one.
                torch.cuda.current_stream(weight.device).synchronize()
            self._prepared[name, backend] = kept
        return kept[1]

    def _require_eager(self, what: str) -> None:
        """What reads values on the host, or keeps what it computes, cannot be part of a graph."""
        device = next((b.device for b in self._buffers.values() if b is not None), None)
        if device is not None and capturing(device):
            raise Unsupported(
                f"{what} for the first time while a CUDA graph is captured; "
                "allowed: one call of the layer before the capture"
            )

    def refresh(self) -> None:
        """Read all weights again, here and in all parts: for writes that torch does not count.

        Raises:
            ConfigError: a weight has values that are not allowed.
        """
        for module in self.modules():
            if isinstance(module, ExactModule):
                module._forget()
                module._check()

    def _seen(self, names: Iterable[str]) -> Seen:
        """What some buffers are now, for `_changed`. ConfigError: one has lost its memory."""
        seen: Seen = []
        for name in names:
            tensor = self._buffers[name]
            if tensor is None:
                seen.append((name, None, 0, None))
            else:
                if tensor.data_ptr() == 0 and tensor.numel() and tensor.device.type != "meta":
                    raise ConfigError(
                        f"{name} has no memory (its storage was resized to "
                        f"{tensor.untyped_storage().nbytes()} bytes); "
                        f"allowed: {tensor.nbytes} bytes"
                    )
                version = None if tensor.is_inference() else tensor._version
                seen.append((name, tensor, tensor.data_ptr(), version))
        return seen

    def _changed(self, seen: Seen) -> bool:
        """Whether a buffer is another one now, or has been written. Takes well under a microsecond
        a buffer: every call asks.
        """
        buffers = self._buffers
        for name, tensor, address, version in seen:
            if buffers[name] is not tensor:
                return True
            if tensor is not None and (
                tensor.data_ptr() != address or (version is not None and tensor._version != version)
            ):
                return True
        return False

    def _check(self) -> None:
        for name in self._packed_meta:
            self.packed(name)  # checks the values

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
        self._check()

    def __getstate__(self) -> dict[str, Any]:
        # Caches point into live memory: a copy or an unpickled module makes its own.
        return {**self.__dict__, "_packed_cache": {}, "_prepared": {}}


def _part_names(name: str) -> list[str]:
    return [f"{name}_{part}" for part in _PARTS]


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
