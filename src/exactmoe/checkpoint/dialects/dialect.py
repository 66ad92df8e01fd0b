"""How one projection lies in a checkpoint: a dialect is a table of its tensors."""

from dataclasses import dataclass

import torch

# E8M0 scales are published as bytes, as F8_E8M0, and as the float32 powers of two that they mean.
E8M0_DTYPES = ("F8_E8M0", "U8", "F32")


@dataclass(frozen=True)
class Part:
    """One tensor of a projection with N outputs and K inputs.

    Attributes:
        field: the field of PackedWeight that it fills: "codes", "scales" or "global_scale".
        suffix: what follows the projection's name, for example ".weight_scale".
        dtypes: allowed ones, as safetensors spells them.
        per: inputs that one stored value covers; None: one value for the whole projection.
        stored: dtype in PackedWeight. Codes and E8M0 scales become bytes, never by value.
        rows_per: outputs that one stored value covers. Above 1 the last ones may cover less.
    """

    field: str
    suffix: str
    dtypes: tuple[str, ...]
    per: int | None
    stored: torch.dtype
    rows_per: int = 1

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """Shape for N = rows, K = columns; () where there is one value."""
        return () if self.per is None else (-(-rows // self.rows_per), -(-columns // self.per))

    def divides(self, columns: int) -> bool:
        """Whether K = columns can be stored."""
        return self.per is None or self.rows_per > 1 or columns % self.per == 0


@dataclass(frozen=True)
class Dialect:
    """A layout of weights.

    Attributes:
        name: what reports and errors call it.
        format: of PackedWeight.
        parts: its tensors; the first holds the codes.
        global_scale_op: of PackedWeight.
    """

    name: str
    format: str
    parts: tuple[Part, ...]
    global_scale_op: str = "multiply"

    def describe(self, word: str = "") -> str:
        """Name and tensors, for errors; `word` is the last word of the projection's name."""
        parts = (f"{(word + p.suffix).lstrip('.')} {' or '.join(p.dtypes)}" for p in self.parts)
        return f"{self.name} ({', '.join(parts)})"


@dataclass(frozen=True)
class RefusedLayout:
    """A layout that is known and not run.

    Attributes:
        name: what errors call it.
        suffixes: tensors by which it is recognised; all of them must be there.
        reason: why it is not run.
    """

    name: str
    suffixes: frozenset[str]
    reason: str
