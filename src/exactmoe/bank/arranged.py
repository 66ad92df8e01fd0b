"""ArrangedModule: packed weights whose bytes may be in the order of a kernel, in place.

Canonical order is the checkpoint's. Fragment order (formats/fragment.py) is what the fast path of a
GPU reads: the same shapes, dtypes and sizes, other bytes. There is never a second copy of all
weights: what leaves the module (a state dict, a pickle, a copy, `packed`) is converted on its way.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from exactmoe.bank.module import ExactModule
from exactmoe.errors import ConfigError, Unsupported
from exactmoe.formats import PackedWeight, fp8_exact
from exactmoe.formats import fragment as layout
from exactmoe.ops import CANONICAL, FRAGMENT, FRAGMENT_FP8, Path
from exactmoe.runtime import workspace
from exactmoe.runtime.devices import capturing, current

_ORDERS = (CANONICAL, FRAGMENT, FRAGMENT_FP8)


class ArrangedModule(ExactModule):
    """Packed weights in one of two orders.

    In fragment order the buffers `name_codes` and `name_scales` may not be written or exchanged;
    a call would raise ConfigError. `arrange("canonical")` first, or load a state dict.
    """

    def __init__(self, fixed_order: bool = False) -> None:
        super().__init__()
        self.fixed_order = fixed_order
        self._layout = CANONICAL
        # Of weights in the order fragment_fp8: bool [E], the experts that lie for the fp8 units.
        self._fp8: dict[str, Tensor] = {}
        self._captured: int | None = None

    @property
    def layout(self) -> str:
        """Order of the bytes in the buffers now: "canonical", "fragment" or "fragment_fp8"."""
        return self._layout

    def packed(self, name: str) -> PackedWeight:
        """The packed weight in canonical order: over the buffers, or a copy of them."""
        weight = self._stored(name)
        if self._layout == CANONICAL:
            return weight
        return layout.from_fragment(weight, self._fp8.get(name))

    def prepared_for(self, path: Path) -> tuple[Any, ...]:
        """All weights as a path reads them, prepared once until the buffers change. Bytes in
        canonical order are put into the order of the path, in place.

        Raises:
            Unsupported: they are in an order that the path does not read.
        """
        wanted = path.storage.layout
        for name in self._packed_meta:
            self._stored(name)  # takes a module that was changed back to canonical order
        before = self._layout
        if before != wanted:
            if before != CANONICAL:
                raise Unsupported(
                    f"backend {path.name!r} reads experts in {wanted} order, and these are in "
                    f"{self._layout} order for another backend; allowed: bank.arrange({wanted!r}) "
                    "first, or a copy of the layer (copy.deepcopy), which is in canonical order"
                )
            self.arrange(wanted)
        try:
            found = tuple(self._prepared_one(name, path) for name in self._packed_meta)
        except Unsupported:
            if before != wanted:
                self.arrange(before)
            raise
        device = self._device()
        if device is not None and capturing(device):
            self._captured = workspace.releases(device)
        return found

    def _prepared_one(self, name: str, path: Path) -> Any:
        fp8 = self._fp8.get(name)
        prepare: Callable[..., Any] = path.prepare
        if fp8 is not None:  # only paths that read this order are given it
            prepare = partial(prepare, fp8=fp8)
        return self.prepared(name, path.name, prepare)

    def arrange(self, wanted: str) -> None:
        """Put the bytes of all weights in an order, in place, with a small buffer in between.

        Args:
            wanted: "canonical", "fragment", or "fragment_fp8": experts that are exact on the fp8
                matrix units (formats/units.py) as these read them, the others as in "fragment".

        Raises:
            ConfigError: there is no such order, or bytes in fragment order were written.
            Unsupported: a format or a size has no fragment order, the order is fixed, or a
                captured graph may read the bytes as they are.
        """
        if wanted not in _ORDERS:
            raise ConfigError(f"layout is {wanted!r}; allowed: {', '.join(_ORDERS)}")
        if wanted == self._layout:
            return
        if CANONICAL not in (wanted, self._layout):
            self.arrange(CANONICAL)
        self._require_movable(wanted)
        weights = [self._stored(name) for name in self._packed_meta]
        if wanted != CANONICAL:
            for name, weight in zip(self._packed_meta, weights, strict=True):
                reason = layout.unsupported(weight)
                if wanted == FRAGMENT_FP8 and weight.device.type == "meta":
                    reason = "its bytes decide the order, and the meta device has none"
                if reason is not None:
                    raise Unsupported(f"{name} has no fragment order: {reason}")
        self._prepared.clear()
        if wanted == FRAGMENT_FP8:  # of all, before the first byte moves
            self._fp8 = {n: fp8_exact(w) for n, w in zip(self._packed_meta, weights, strict=True)}
        for name, weight in zip(self._packed_meta, weights, strict=True):
            # Not counted as a write: the weights are the same, so whoever keeps something of a
            # buffer's version (a cached layer over a model's parameters) may go on.
            self._convert(name, weight, wanted)
        self._layout = wanted

    def _convert(self, name: str, weight: PackedWeight, wanted: str) -> None:
        change = layout.to_canonical if wanted == CANONICAL else layout.to_fragment
        if weight.device.type != "cuda":
            change(_uncounted(weight), self._fp8.get(name))
        else:
            # Calls on other streams may still read the old bytes, or read the new ones next.
            torch.cuda.synchronize(weight.device)
            with current(weight.device):
                change(_uncounted(weight), self._fp8.get(name))
            torch.cuda.synchronize(weight.device)
        if wanted == CANONICAL:
            self._fp8.pop(name, None)

    def _require_movable(self, wanted: str) -> None:
        if self.fixed_order:
            raise Unsupported(
                f"the order of these bytes is fixed, they belong to a module that reads them; "
                f"allowed: {self._layout}"
            )
        self._require_eager("the experts' bytes are rearranged")
        device = self._device()
        if device is not None and self._captured == workspace.releases(device):
            raise Unsupported(
                f"a captured CUDA graph may read these experts in {self._layout} order; allowed: "
                f"arrange({wanted!r}) after exactmoe.runtime.workspace.release_captures(device)"
            )

    def _device(self) -> Any:
        return next((b.device for b in self._buffers.values() if b is not None), None)

    def _stored(self, name: str) -> PackedWeight:
        """The weight over the buffers, in the order that they have."""
        kept = self._packed_cache.get(name)
        if self._layout == CANONICAL or (kept is not None and not self._changed(kept[0])):
            return super()._stored(name)
        moved = [seen[0] for n in self._packed_meta for seen in self._rewritten(n)]
        if moved:
            raise ConfigError(
                f"{', '.join(moved)} changed while the experts are in {self._layout} order; "
                f"allowed: arrange({CANONICAL!r}) before weights are written or exchanged, or "
                "load_state_dict"
            )
        # A global scale was written, which has no order: all is read again.
        self._require_movable(CANONICAL)
        for key, (_, weight) in self._packed_cache.items():
            self._convert(key, weight, CANONICAL)
        self._layout = CANONICAL
        self._packed_cache.clear()
        self._prepared.clear()
        return super()._stored(name)

    def _rewritten(self, name: str) -> list[Any]:
        """Of the codes and scales of a weight, what is not as it was arranged."""
        seen, _ = self._packed_cache[name]
        return [entry for entry in seen[:2] if self._changed([entry])]

    def _forget(self) -> None:
        if self._layout != CANONICAL:
            self.arrange(CANONICAL)
        super()._forget()

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({prefix + key: part for key, part in self._converted().items()})

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        names = [n for name in self._packed_meta for n in (f"{name}_codes", f"{name}_scales")]
        if self._layout != CANONICAL and all(
            self._replaces(name, state_dict.get(prefix + name)) for name in names
        ):
            self._require_movable(CANONICAL)
            self._layout = CANONICAL  # of the bytes that come
            self._fp8.clear()
            self._packed_cache.clear()
        elif self._layout != CANONICAL:
            self.arrange(CANONICAL)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _replaces(self, name: str, given: Any) -> bool:
        """Whether a load overwrites all of a buffer; else its own bytes have to be put in order
        first, since the load may fail.
        """
        held = self._buffers[name]
        if held is None or not isinstance(given, Tensor):
            return False
        return given.shape == held.shape and given.dtype == held.dtype

    def _converted(self) -> dict[str, Tensor]:
        """Canonical copies of the buffers that are in another order, by name."""
        copies: dict[str, Tensor] = {}
        for name in self._packed_meta if self._layout != CANONICAL else ():
            weight = self.packed(name)
            copies[f"{name}_codes"] = weight.codes
            if weight.scales is not None:
                copies[f"{name}_scales"] = weight.scales
        return copies

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        buffers = {**self._buffers, **self._converted()}
        return {
            **state,
            "_buffers": buffers,
            "_layout": CANONICAL,
            "_fp8": {},
            "_captured": None,
        }


def _uncounted(weight: PackedWeight) -> PackedWeight:
    """The same memory, with version counters of its own."""
    detached = object.__new__(PackedWeight)
    scales = None if weight.scales is None else weight.scales.data
    # Not checked: the rules hold for canonical bytes.
    fields = {**weight.__dict__, "codes": weight.codes.data, "scales": scales}
    for name, value in fields.items():
        object.__setattr__(detached, name, value)
    return detached
