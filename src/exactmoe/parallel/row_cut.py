"""RowCut: dense parts cut over ranks by output rows, so that no sum crosses ranks.

Each rank multiplies whole rows of k; what crosses is h in its stored form and finished float32 dots
(contract section 7).
"""

from dataclasses import dataclass, replace

from exactmoe.formats import PackedWeight

# Rows that stay together: a block scale of FP8 is shared by 128 rows.
_TOGETHER = {"bf16": 16, "nvfp4": 16, "fp8": 128}


@dataclass(frozen=True)
class RowCut:
    """The output rows of one projection, by rank.

    Attributes:
        bounds: rank r has the rows bounds[r] to bounds[r + 1] - 1; at least one.
    """

    bounds: tuple[int, ...]

    @classmethod
    def of(cls, format: str, rows: int, num_ranks: int) -> "RowCut | None":
        """Consecutive rows, as equal as whole blocks of them allow; None where they cannot be cut:
        fewer blocks than ranks, or MXFP4, whose common exponent is one of all rows.
        """
        block = _TOGETHER.get(format)
        blocks = 0 if block is None else -(-rows // block)
        if block is None or blocks < num_ranks:
            return None
        base, more = divmod(blocks, num_ranks)
        ends = [0]
        for rank in range(num_ranks):
            ends.append(min(ends[-1] + (base + (rank < more)) * block, rows))
        return cls(tuple(ends))

    @property
    def rows(self) -> int:
        return self.bounds[-1]

    @property
    def most(self) -> int:
        """Rows of the rank with the most: all send as many."""
        return max(self.count(rank) for rank in range(len(self.bounds) - 1))

    def count(self, rank: int) -> int:
        """Rows of a rank."""
        return self.bounds[rank + 1] - self.bounds[rank]

    def part(self, rank: int) -> slice:
        """The rows of a rank."""
        return slice(self.bounds[rank], self.bounds[rank + 1])

    def taken(self, weight: PackedWeight, rank: int) -> PackedWeight:
        """A rank's rows of one expert's weight: views of its memory."""
        rows = self.part(rank)
        block_rows = rows
        if weight.format == "fp8":
            together = _TOGETHER["fp8"]
            block_rows = slice(rows.start // together, -(-rows.stop // together))
        scales = None if weight.scales is None else weight.scales[:, block_rows]
        return replace(weight, codes=weight.codes[:, rows], scales=scales)
