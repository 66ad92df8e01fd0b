"""ExpertBank: gate, up and down of E experts, packed."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from exactmoe.bank.arranged import ArrangedModule
from exactmoe.bank.partition import Partition
from exactmoe.bank.projections import PROJECTIONS, Projections
from exactmoe.errors import ConfigError
from exactmoe.formats import PackedWeight, quantize
from exactmoe.ops import CANONICAL

if TYPE_CHECKING:
    from exactmoe.bank.split import SplitBank


class ExpertBank(Projections, ArrangedModule):
    """The packed weights of E experts: gate and up [E, I, H], down [E, H, I]. Nothing is
    dequantised or copied. After a write through `.data` or numpy: `refresh()`.

    Whatever order the bytes are in (`layout`), gate, up, down, a state dict, a pickle and a copy
    are in canonical order.

    Args:
        fixed_order: the bytes stay in canonical order: they belong to somebody who reads them.

    Raises:
        ConfigError: the three weights do not fit together (experts, sizes, devices).
    """

    _released = False

    def __init__(
        self, gate: PackedWeight, up: PackedWeight, down: PackedWeight, fixed_order: bool = False
    ) -> None:
        super().__init__(fixed_order)
        for name, weight in (("gate", gate), ("up", up), ("down", down)):
            if not isinstance(weight, PackedWeight):
                raise ConfigError(f"{name} is {type(weight).__name__}; allowed: PackedWeight")
        experts, inner, hidden = gate.num_experts, gate.rows, gate.columns
        for name, weight, expected in (
            ("up", up, (experts, inner, hidden)),
            ("down", down, (experts, hidden, inner)),
        ):
            found = (weight.num_experts, weight.rows, weight.columns)
            if found != expected:
                raise ConfigError(
                    f"{name} is {found} (experts, rows, columns); gate asks for {expected}"
                )
            if weight.device != gate.device:
                raise ConfigError(
                    f"{name} is on {weight.device}, gate on {gate.device}; allowed: one device"
                )
        for name, weight in (("gate", gate), ("up", up), ("down", down)):
            self.register_packed(name, weight)

    @property
    def num_experts(self) -> int:
        return int(self.gate_codes.shape[0])

    def split(
        self, partition: Partition, cards: Sequence[torch.device | str], *, keep: bool = False
    ) -> "SplitBank":
        """Puts each expert on the card that owns it, in canonical order.

        Bytes are copied in pieces of 64 MiB, then every byte is read back and compared; only then
        does this bank let its memory go, and no longer holds experts.

        Args:
            partition: who owns which expert.
            cards: a device for each card.
            keep: keep the experts here as well.

        Raises:
            ConfigError: the partition is of other experts or cards, or a range passes its bank.
            BitMismatch: a byte differs; names card and piece. This bank is as it was.
        """
        from exactmoe.bank.split import split

        return split(self, partition, cards, keep=keep)

    def release(self) -> None:
        """Let the memory of the experts go. What reads them afterwards raises ConfigError."""
        self._require_eager("the experts are released")
        self._packed_cache.clear()
        self._prepared.clear()
        self._buffers.clear()
        self._released = True

    def _stored(self, name: str) -> PackedWeight:
        if self._released:
            self._refuse(name)
        return super()._stored(name)

    def __getattr__(self, name: str) -> Any:
        if self._released and name.startswith(PROJECTIONS):
            self._refuse(name)
        return super().__getattr__(name)

    def _refuse(self, name: str) -> None:
        raise ConfigError(
            f"{name} was released, its experts were split over cards; "
            "allowed: split(..., keep=True) keeps them"
        )

    def extra_repr(self) -> str:
        if self._released:
            return "released"
        sizes = f"num_experts={self.num_experts}, hidden_size={self.hidden_size}"
        sizes += f", intermediate_size={self.intermediate_size}"
        order = "" if self.layout == CANONICAL else f", layout={self.layout}"
        return f"{sizes}, formats={self.formats}, nbytes={self.nbytes}{order}"


def quantize_experts(
    gate: Tensor, up: Tensor, down: Tensor, format: str, rule: str | None = None
) -> ExpertBank:
    """Quantise the experts of a layer: gate and up [E, I, H], down [E, H, I], bf16 or f32 ->
    ExpertBank.

    format is "nvfp4" or "mxfp4"; rule names how scales are chosen (formats/quantize.py), by default
    the publisher's.

    Raises:
        ConfigError: unknown format or rule, wrong dtype, or a value that is not finite (its place
            is named).
    """
    return ExpertBank(
        quantize(gate, format, rule), quantize(up, format, rule), quantize(down, format, rule)
    )
