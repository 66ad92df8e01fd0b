"""How one projection of one expert lies in a checkpoint: a dialect is a table of its tensors."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Part:
    """One tensor of a projection with N outputs and K inputs.

    Attributes:
        field: the field of PackedWeight that it fills: "codes", "scales" or "global_scale".
        leaf: what follows the projection's name and a dot, for example "weight_scale".
        dtype: as safetensors spells it.
        per: inputs that one stored value covers, so the shape is [N, K // per]; None: one value for
            the whole projection, () or [1].
        stored: dtype in PackedWeight. FP8, E8M0 and int8 are taken over as bytes, never by value.
    """

    field: str
    leaf: str
    dtype: str
    per: int | None
    stored: torch.dtype

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """Shape for N = rows, K = columns."""
        return () if self.per is None else (rows, columns // self.per)


@dataclass(frozen=True)
class Dialect:
    """A layout of packed weights.

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
