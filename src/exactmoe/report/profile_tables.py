"""A profile as tables: eager calls by width and layer, and captured graphs."""

import io
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from exactmoe.runtime.spans import NAMES

if TYPE_CHECKING:
    from exactmoe.report.profile import GraphRow, Profile, Row


def columns(rows: Sequence["Row"]) -> list[str]:
    """The spans that occur, in the order of a call."""
    return [name for name in NAMES if any(name in row.us for row in rows)]


def by_width(rows: Sequence["Row"]) -> dict[int, list["Row"]]:
    """Width -> its rows, by layer."""
    found: dict[int, list[Row]] = {}
    for row in rows:
        found.setdefault(row.width, []).append(row)
    return found


def summed(rows: Sequence["Row"]) -> dict[str, float]:
    """Span -> microseconds of all layers of a width; "call" and "rest" too."""
    found = {name: sum(row.us.get(name, 0.0) for row in rows) for name in columns(rows)}
    found["rest"] = sum(row.rest_us for row in rows)
    found["call"] = sum(row.call_us for row in rows)
    return found


def tables(rows: Sequence["Row"], graphs: Sequence["GraphRow"]) -> Iterator[Table]:
    """One table a width, and one of the captured graphs."""
    for width, of_width in by_width(rows).items():
        names = columns(of_width)
        title = f"{width} token{'s' * (width != 1)} a call, eager: microseconds, medians"
        made = Table(title=title, title_justify="left")
        for name in ("layer", "calls", *names, "rest", "whole call"):
            made.add_column(name, justify="right")
        for row in of_width:
            cells = [_us(row.us.get(name)) for name in names]
            whole = (_us(row.rest_us), _us(row.call_us))
            made.add_row(f"{row.layer}", f"{row.calls}", *cells, *whole)
        total = summed(of_width)
        made.add_section()
        cells = [_us(total[name]) for name in (*names, "rest", "call")]
        made.add_row("all", "", *cells)
        yield made
    if graphs:
        yield _graph_table(graphs)


def _graph_table(graphs: Sequence["GraphRow"]) -> Table:
    title = "captured graphs: microseconds of each layer's call, medians over replays"
    made = Table(title=title, title_justify="left")
    layers = sorted({layer for graph in graphs for layer in graph.us})
    for name in ("graph", "tokens", "replays", *(f"layer {layer}" for layer in layers), "all"):
        made.add_column(name, justify="right")
    for graph in graphs:
        cells = [_us(graph.us.get(layer)) for layer in layers]
        numbers = (graph.graph, graph.width, graph.replays)
        made.add_row(*map(str, numbers), *cells, _us(graph.total_us))
    return made


def text(profiled: "Profile") -> str:
    """All tables as plain text."""
    out = Console(file=io.StringIO(), highlight=False, width=160)
    for table in tables(profiled.rows(), profiled.graphs()):
        out.print(table)
    if profiled.lost:
        out.print(lost_line(profiled.lost))
    return out.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def lost_line(lost: int) -> str:
    """Says that the capacity was not enough."""
    return f"{lost:,} spans were beyond the capacity and are not counted"


def _us(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}"
