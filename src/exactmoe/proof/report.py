"""Report: what was compared, how much of it, and the first difference of each dimension."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table
from torch import Tensor

from exactmoe.errors import BitMismatch
from exactmoe.proof.compare import Difference, first_difference, hexadecimal, same_bytes
from exactmoe.proof.machine import fingerprint


@dataclass
class Count:
    """One dimension: rows compared, their bytes, rows that differ, the first difference."""

    comparisons: int = 0
    nbytes: int = 0
    mismatches: int = 0
    first: Difference | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "comparisons": self.comparisons,
            "bytes": self.nbytes,
            "mismatches": self.mismatches,
            "first": None if self.first is None else self.first.to_dict(),
        }


@dataclass
class Report:
    """The result of one proof.

    Attributes:
        subject: what was proved, for example "layer 3: MoELayer, hash".
        dimensions: name -> Count, in the order they ran.
        machine: see proof/machine.py.
        seconds: how long it took.
    """

    subject: str
    dimensions: dict[str, Count] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=fingerprint)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether something was compared and nothing differed."""
        return self.comparisons > 0 and self.mismatches == 0

    @property
    def comparisons(self) -> int:
        """Rows compared, over all dimensions."""
        return sum(count.comparisons for count in self.dimensions.values())

    @property
    def nbytes(self) -> int:
        """Bytes compared, over all dimensions."""
        return sum(count.nbytes for count in self.dimensions.values())

    @property
    def mismatches(self) -> int:
        """Rows that differ, over all dimensions."""
        return sum(count.mismatches for count in self.dimensions.values())

    @property
    def differences(self) -> list[Difference]:
        """The first difference of each dimension that has one."""
        return [count.first for count in self.dimensions.values() if count.first is not None]

    def compare(
        self,
        dimension: str,
        case: str,
        expected: Tensor,
        found: Tensor,
        width: int | None = None,
        first_token: int = 0,
    ) -> None:
        """Compare the bytes of `expected` and `found` [T, H] and count them under `dimension`.

        width: tokens in the call that gave `found` (default T). first_token: the row of that call
        at which `found` starts.
        """
        count = self.dimensions.setdefault(dimension, Count())
        count.comparisons += expected.shape[0]
        count.nbytes += expected.numel() * expected.element_size()
        if same_bytes(expected, found):
            return
        for row in range(expected.shape[0]):
            count.mismatches += not same_bytes(expected[row], found[row])
        place = first_difference(expected, found)
        if count.first is None and place is not None:
            row, column = place
            pair = (expected[row, column], found[row, column])
            count.first = Difference(
                dimension=dimension,
                case=case,
                width=found.shape[0] if width is None else width,
                token=first_token + row,
                element=column,
                expected=f"{float(pair[0]):.9g}",
                found=f"{float(pair[1]):.9g}",
                expected_bits=hexadecimal(pair[0]),
                found_bits=hexadecimal(pair[1]),
            )

    def raise_on_mismatch(self) -> None:
        """Raise BitMismatch that names the first difference of each dimension, if there is one."""
        if self.mismatches:
            lines = [str(difference) for difference in self.differences]
            raise BitMismatch("\n".join([f"{self.subject}: {self.mismatches} rows differ", *lines]))
        if not self.comparisons:
            raise BitMismatch(f"{self.subject}: nothing was compared")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "subject": self.subject,
            "ok": self.ok,
            "comparisons": self.comparisons,
            "bytes": self.nbytes,
            "mismatches": self.mismatches,
            "dimensions": {name: count.to_dict() for name, count in self.dimensions.items()},
            "seconds": self.seconds,
            "machine": self.machine,
        }

    def table(self) -> Table:
        """The table of proof, for people."""
        return table([self])

    def __str__(self) -> str:
        lines = [f"{self.subject}: {'ok' if self.ok else 'FAILED'}"]
        for name, count in self.dimensions.items():
            found = f"{count.mismatches} differ" if count.mismatches else "equal"
            lines.append(
                f"  {name:<14} {count.comparisons:>8} rows {count.nbytes:>12} bytes  {found}"
            )
            if count.first is not None:
                lines.append(f"    first: {count.first}")
        return "\n".join(lines)


def table(reports: Sequence[Report], title: str | None = None) -> Table:
    """One table of several reports: subject, dimension, rows and bytes compared, result."""
    made = Table(title=title, title_justify="left")
    made.add_column("subject")
    made.add_column("dimension")
    made.add_column("rows", justify="right")
    made.add_column("bytes", justify="right")
    made.add_column("result")
    for report in reports:
        for position, (name, count) in enumerate(report.dimensions.items()):
            result = f"[red]{count.mismatches} differ[/red]" if count.mismatches else "equal"
            made.add_row(
                report.subject if position == 0 else "",
                name,
                f"{count.comparisons:,}",
                f"{count.nbytes:,}",
                result,
                end_section=position == len(report.dimensions) - 1,
            )
    return made
