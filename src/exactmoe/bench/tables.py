"""The tables that a benchmark prints: one a part, widths as columns, lines that Markdown reads."""

from collections.abc import Callable, Sequence

from rich import box
from rich.table import Table

from exactmoe.bench.record import BLOCK, EXPERTS, OURS, SORT, Record

Cell = Callable[[Record], str]


def tables(records: Sequence[Record]) -> list[Table]:
    """Routed experts with everything compared to them, then each dense part."""
    found = []
    routed = [r for r in records if r.part in (EXPERTS, SORT, BLOCK)]
    if routed:
        found.append(_table("routed experts, us", routed, (EXPERTS, SORT, BLOCK)))
    for part in dict.fromkeys(r.part for r in records if r not in routed):
        found.append(_table(f"{part}, us", [r for r in records if r.part == part], (part,)))
    return found


def _table(title: str, records: Sequence[Record], parts: Sequence[str]) -> Table:
    widths = sorted({r.tokens for r in records if r.tokens})
    made = Table(title=title, title_justify="left", box=box.MARKDOWN)
    made.add_column("tokens")
    for width in widths:
        made.add_column(str(width), justify="right")

    def line(name: str, of: dict[int, Record], cell: Cell) -> None:
        if of:
            made.add_row(name, *(cell(of[width]) if width in of else "" for width in widths))

    def of(part: str, what: str) -> dict[int, Record]:
        return {r.tokens: r for r in records if (r.part, r.what) == (part, what) and r.tokens}

    first = of(parts[0], OURS)
    line("distinct experts", {w: r for w, r in first.items() if r.distinct_experts}, _distinct)
    line("floor", first, lambda r: _number(r.floor_us))
    line(f"{OURS}, {parts[0]}", first, lambda r: _number(r.us))
    line("share of the floor", first, lambda r: _percent(r.share))
    line("GB/s", first, lambda r: _number(r.gigabytes_per_second))
    line("error", first, _error)
    in_a8 = {w: r for w, r in first.items() if r.quantized_error is not None}
    line("error, from quantised x and h", in_a8, lambda r: f"{r.quantized_error:.1e}")
    for part in parts[1:]:
        line(f"{OURS}, {part}", of(part, OURS), lambda r: _number(r.us))
    for what in dict.fromkeys(r.what for r in records if r.what != OURS):
        theirs = of(parts[0], what)
        line(what, theirs, lambda r: _number(r.us) or "failed")
        if not what.startswith(OURS):
            line("  times ours", theirs, lambda r: _ratio(r, first))
            line("  error", theirs, _error)
    return made


def notes(records: Sequence[Record]) -> list[str]:
    """What each peer is, whose bits depend on the width, and why one did not run."""
    lines = []
    for what in dict.fromkeys(r.what for r in records if r.what != OURS):
        theirs = [r for r in records if r.what == what]
        told = dict.fromkeys(r.note for r in theirs if r.timing is not None and r.note)
        known = [r.same_bits for r in theirs if r.same_bits is not None]
        if known and not what.startswith(OURS):
            said = "the same" if all(known) else "other"
            told[f"a token's bits at other widths: {said}"] = None
        if told:
            lines.append(f"{what}: {'; '.join(told)}")
        failed = dict.fromkeys(r.note for r in theirs if r.timing is None)
        lines += [f"{what} failed: {note}" for note in failed]
    return lines


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _distinct(record: Record) -> str:
    return _number(record.distinct_experts)


def _error(record: Record) -> str:
    return "" if record.error is None else f"{record.error:.1e}"


def _ratio(record: Record, ours: dict[int, Record]) -> str:
    mine = ours[record.tokens].us if record.tokens in ours else None
    return "" if record.us is None or mine is None else f"{record.us / mine:.2f}"
