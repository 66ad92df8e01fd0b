"""Report: what was compared, how much of it, and the first difference of each dimension.

Errors against float64 are in it too (`bounds`), and what could not run here, with the reason.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table
from torch import Tensor

from exactmoe.errors import BitMismatch
from exactmoe.proof.compare import Difference, bits, first_difference, hexadecimal, same_bytes
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


@dataclass(frozen=True)
class Bound:
    """An error against float64 and what the contract (section 8) allows; NaN is too much."""

    found: float
    allowed: float

    @property
    def ok(self) -> bool:
        """Whether the error is allowed."""
        return self.found <= self.allowed

    def __str__(self) -> str:
        return f"{self.found:.3g}, allowed: {self.allowed:.3g}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; an error that is no number is text there."""
        found = self.found if math.isfinite(self.found) else str(self.found)
        return {"found": found, "allowed": self.allowed, "ok": self.ok}


@dataclass
class Report:
    """The result of one proof.

    Attributes:
        subject: what was proved, for example "layer 3: MoELayer, hash".
        dimensions: name -> Count, in the order they ran.
        bounds: what was measured -> the largest error met, and the allowed one.
        not_run: dimension, or part of one -> why it could not run here.
        machine: see proof/machine.py.
        seconds: how long it took.
        times: dimension, as it was asked for -> seconds of it.
    """

    subject: str
    dimensions: dict[str, Count] = field(default_factory=dict)
    bounds: dict[str, Bound] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=fingerprint)
    seconds: float = 0.0
    times: dict[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether something was compared, nothing differed, and no error is too large."""
        return self.comparisons > 0 and self.mismatches == 0 and not self.excesses

    @property
    def failed(self) -> bool:
        """Not ok, and not because nothing of it can run here."""
        nothing_can_run = self.comparisons == 0 and not self.excesses and bool(self.not_run)
        return not self.ok and not nothing_can_run

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

    @property
    def excesses(self) -> list[str]:
        """The errors that are larger than allowed, as text."""
        return [f"{name}: error {bound}" for name, bound in self.bounds.items() if not bound.ok]

    def measure(self, name: str, found: float, allowed: float) -> None:
        """An error against float64. Of several with one name the worst against its own bound is
        kept.
        """
        kept, new = self.bounds.get(name), Bound(found, allowed)
        if kept is None or (kept.ok and not found / allowed <= kept.found / kept.allowed):
            self.bounds[name] = new

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
        different = (bits(expected) != bits(found)).any(-1)
        count.mismatches += int(different.sum())
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
        if self.mismatches or self.excesses:
            lines = [*(str(difference) for difference in self.differences), *self.excesses]
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
            "bounds": {name: bound.to_dict() for name, bound in self.bounds.items()},
            "not_run": dict(self.not_run),
            "seconds": self.seconds,
            "times": dict(self.times),
            "machine": self.machine,
        }

    def table(self) -> Table:
        """The table of proof, for people."""
        return table([self])

    def __str__(self) -> str:
        verdict = "ok" if self.ok else "FAILED" if self.failed else "not run"
        lines = [f"{self.subject}: {verdict}"]
        for name, count in self.dimensions.items():
            found = f"{count.mismatches} differ" if count.mismatches else "equal"
            lines.append(
                f"  {name:<14} {count.comparisons:>8} rows {count.nbytes:>12} bytes  {found}"
            )
            if count.first is not None:
                lines.append(f"    first: {count.first}")
        for name, bound in self.bounds.items():
            lines.append(f"  {name}: error {bound}{'' if bound.ok else '  TOO LARGE'}")
        lines += [f"  {name}: not run: {reason}" for name, reason in self.not_run.items()]
        return "\n".join(lines)


def table(reports: Sequence[Report], title: str | None = None) -> Table:
    """One table of several reports: subject, dimension, rows and bytes compared, seconds, result;
    the last line of a report sums it up.
    """
    made = Table(title=title, title_justify="left")
    made.add_column("subject")
    made.add_column("dimension")
    for name in ("rows", "bytes", "seconds"):
        made.add_column(name, justify="right")
    made.add_column("result")
    for report in reports:
        subject = report.subject
        for name, *cells in _table_rows(report):
            made.add_row(subject, name, *cells)
            subject = ""
        made.add_section()
    return made


def _table_rows(report: Report) -> Iterator[tuple[str, str, str, str, str]]:
    """dimension, rows, bytes, seconds, result."""
    for name, count in report.dimensions.items():
        result = f"[red]{count.mismatches} differ[/red]" if count.mismatches else "equal"
        seconds = f"{report.times[name]:.1f}" if name in report.times else ""
        yield name, f"{count.comparisons:,}", f"{count.nbytes:,}", seconds, result
    for name, bound in report.bounds.items():
        yield name, "", "", "", f"error {bound}" if bound.ok else f"[red]error {bound}[/red]"
    for name, reason in report.not_run.items():
        yield name, "", "", "", f"not run: {reason}"
    verdict = "ok" if report.ok else "[red]FAILED[/red]" if report.failed else "not run"
    yield "all", f"{report.comparisons:,}", f"{report.nbytes:,}", f"{report.seconds:.1f}", verdict
