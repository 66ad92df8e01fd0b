"""Projections: gate, up and down, as everything here has them that holds an MLP's weights."""

from collections.abc import Iterator

import torch
from torch import Tensor

from exactmoe.bank.module import ExactModule
from exactmoe.formats import PackedWeight
from exactmoe.plan import WeightShape

PROJECTIONS = ("gate", "up", "down")


class Projections(ExactModule):
    """gate and up [E, rows, H], down [E, rows, I]: packed weights of these names.

    Where the weights are not its own buffers, a subclass says what `packed`, `device`, `formats`,
    `shapes` and `nbytes` are.
    """

    gate_codes: Tensor

    @property
    def gate(self) -> PackedWeight:
        return self.packed("gate")

    @property
    def up(self) -> PackedWeight:
        return self.packed("up")

    @property
    def down(self) -> PackedWeight:
        return self.packed("down")

    def weights(self) -> Iterator[PackedWeight]:
        """gate, up and down in canonical order, one at a time: each may be a copy."""
        for name in PROJECTIONS:
            yield self.packed(name)

    @property
    def device(self) -> torch.device:
        return self.gate_codes.device

    @property
    def formats(self) -> tuple[str, str, str]:
        """Formats of gate, up and down."""
        gate, up, down = (self._packed_meta[name][0] for name in PROJECTIONS)
        return gate, up, down

    @property
    def shapes(self) -> tuple[WeightShape, ...]:
        """Format, rows and columns of gate, up and down."""
        return tuple(
            WeightShape.of(self._packed_meta[name][0], getattr(self, f"{name}_codes"))
            for name in PROJECTIONS
        )

    @property
    def hidden_size(self) -> int:
        return self.shapes[0].columns

    @property
    def intermediate_size(self) -> int:
        """I, also where gate and up have only some of its rows."""
        return self.shapes[2].columns

    @property
    def nbytes(self) -> int:
        """Bytes of codes, block scales and global scales."""
        return sum(buffer.nbytes for buffer in self.buffers())
