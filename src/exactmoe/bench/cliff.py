"""No cliff: one token more may cost what its new experts cost, and a little."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from exactmoe.bench.record import EXPERTS, OURS, Record

STEP_LIMIT = 1.25
UNION_LIMIT = 1.15
UNION_WIDTHS = range(2, 9)


def cliff_widths(tile_of: Callable[[int], Hashable], widest: int) -> tuple[int, ...]:
    """1 to 17, and up to `widest` the widths around each at which another tile is chosen."""
    borders = [w for w in range(2, widest) if tile_of(w) != tile_of(w - 1)]
    around = {border + step for border in borders for step in (-2, -1, 0, 1)}
    return tuple(sorted({*range(1, 18), *(width for width in around if width > 0)}))


@dataclass(frozen=True)
class Step:
    """From one width to another.

    Attributes:
        rule: what is asked for, in words.
        allowed, found: time over time.
    """

    rule: str
    low: int
    high: int
    allowed: float
    found: float

    @property
    def ok(self) -> bool:
        return self.found <= self.allowed

    def __str__(self) -> str:
        verdict = "ok" if self.ok else "CLIFF"
        return (
            f"{verdict}: {self.low} -> {self.high} tokens takes {self.found:.3f} times as long; "
            f"allowed {self.allowed:.3f} ({self.rule})"
        )


def steps(records: Sequence[Record]) -> list[Step]:
    """Every pair of widths T, T + 1, and 2 ... 8 rows against one.

    time(T + 1) <= 1.25 x time(T) x max(1, U(T + 1) / U(T)), and for T = 2 ... 8
    time(T) <= 1.15 x U(T) / K x time(1): U distinct experts, K = U(1).
    """
    times: dict[int, tuple[float, float]] = {}
    for record in records:
        if record.part == EXPERTS and record.what == OURS and record.us and record.distinct_experts:
            times[record.tokens] = record.us, record.distinct_experts
    found = []
    for width, (us, distinct) in sorted(times.items()):
        if width + 1 in times:
            next_us, next_distinct = times[width + 1]
            allowed = STEP_LIMIT * max(1.0, next_distinct / distinct)
            found.append(Step("one token more", width, width + 1, allowed, next_us / us))
    for width in UNION_WIDTHS:
        if width in times and 1 in times:
            allowed = UNION_LIMIT * times[width][1] / times[1][1]
            ratio = times[width][0] / times[1][0]
            found.append(Step("the union of experts", 1, width, allowed, ratio))
    return found
