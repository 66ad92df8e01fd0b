"""Rows: activations as a dot reads them."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Rows:
    """T rows of K activations, held decoded.

    Attributes:
        values: float32 [T, K]; each value is exactly a bf16 (`a16`) or exactly an e4m3 (`a8`).
        scales: float32 [T, K // 128], powers of two (`a8`); None in `a16`.
        packed: scratch for the rows in the packed order of a path that has one (ops/path.py); of
            rows in that order, their values x 2^8 as bf16.
    """

    values: Tensor
    scales: Tensor | None
    packed: "Tensor | Rows | None" = None
