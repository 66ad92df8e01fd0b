"""How many experts the fp8 matrix units hold without losing a bit, and by how much they miss.

Class `a8` decides by expert and projection, from its own bytes (contract section 3).
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from exactmoe.checkpoint import LayerPlan, Reader, WeightPlan
from exactmoe.formats.units import MAX_FP8_BINADES, NO_POWERS, piece_spans

# Codes that are read and counted at a time. Masks and exponents of them take about as much again.
CHUNK_BYTES = 2**26
_FP4 = ("nvfp4", "mxfp4")


@dataclass(frozen=True)
class UnitCount:
    """The experts of one projection.

    Attributes:
        experts: how many there are.
        exact: how many of them the fp8 units hold exactly.
        spans: most binades within a 128-wide piece of a row -> experts.
        no_powers: experts with a block scale that is no power of two.
    """

    experts: int
    exact: int
    spans: Mapping[int, int]
    no_powers: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        spans = {str(span): count for span, count in sorted(self.spans.items())}
        return {
            "experts": self.experts,
            "exact": self.exact,
            "spans": spans,
            "no_powers_of_two": self.no_powers,
        }

    def __str__(self) -> str:
        """As "22/24, spans 3-17, 1 no powers of two"."""
        text = f"{self.exact}/{self.experts}"
        if self.spans:
            low, high = min(self.spans), max(self.spans)
            text += f", spans {low}" if low == high else f", spans {low}-{high}"
        return text + (f", {self.no_powers} no powers of two" if self.no_powers else "")


def count_units(plan: LayerPlan, reader: Reader) -> dict[str, UnitCount] | None:
    """Of the routed experts of a layer, read a few at a time: projection -> counts.

    None where a projection is no FP4: then the layer is not of class `a8`.

    Raises:
        CheckpointError, Unsupported: bytes that the contract refuses, as the load of the layer.
    """
    if any(weight.dialect.format not in _FP4 for weight in plan.experts.values()):
        return None
    return {name: _count(weight, reader) for name, weight in plan.experts.items()}


def _count(weight: WeightPlan, reader: Reader) -> UnitCount:
    at_a_time = max(1, CHUNK_BYTES // (weight.rows * weight.columns // 2))
    found: Counter[int] = Counter()
    for first in range(0, len(weight.sources), at_a_time):
        some = replace(weight, sources=weight.sources[first : first + at_a_time])
        found.update(piece_spans(reader.weight(some)).tolist())
    spans = {span: count for span, count in found.items() if span != NO_POWERS}
    exact = sum(count for span, count in spans.items() if span <= MAX_FP8_BINADES)
    return UnitCount(len(weight.sources), exact, spans, found[NO_POWERS])


def total(counts: Iterable[UnitCount]) -> UnitCount:
    """All of them together."""
    counts = list(counts)
    spans: Counter[int] = Counter()
    for count in counts:
        spans.update(count.spans)
    return UnitCount(
        experts=sum(count.experts for count in counts),
        exact=sum(count.exact for count in counts),
        spans=spans,
        no_powers=sum(count.no_powers for count in counts),
    )


def histogram(count: UnitCount, width: int = 40) -> list[str]:
    """A line for each span that occurs, with a bar, and one for scales that are no power of two."""
    most = max([*count.spans.values(), count.no_powers, 1])
    rows = [(f"{span:>2} binades", count.spans[span]) for span in sorted(count.spans)]
    rows += [("no powers of two", count.no_powers)] if count.no_powers else []
    lines = []
    for name, experts in rows:
        bar = "#" * max(1, round(width * experts / most))
        lines.append(f"  {name:<16} {experts:>7}  {bar}")
    return lines
