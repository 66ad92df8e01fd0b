"""The pictures of a profile, as PNGs."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from exactmoe.report.drawing import figure_of, png
from exactmoe.report.profile import GraphRow, Row
from exactmoe.report.profile_tables import by_width, columns
from exactmoe.runtime.spans import NAMES

# Of matplotlib's tab20 palette: a colour for each span, the same in every picture.
_COLORS = {
    "router": 4, "sort": 6, "dispatch": 12, "gate_up": 0, "quantize": 8, "down": 2, "return": 13,
    "shared": 16, "combine": 10, "dense": 1, "finish": 11,
}  # fmt: skip
_REST = "#d9d9d9"
_MOST_PANELS = 4


def steps(rows: Sequence[Row], graphs: Sequence[GraphRow]) -> bytes:
    """For each width, the time of all layers by span: in microseconds, and in shares.

    Raises:
        Unsupported: matplotlib is not installed.
    """
    widths = by_width(rows)
    figure = figure_of(1.9 + 0.62 * len(widths))
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    places = np.arange(len(widths))
    stacks = [_stack(of_width) for of_width in widths.values()]
    totals = np.array([sum(stack.values()) for stack in stacks])
    scale, unit = _scale(float(totals.max()))
    _bars(left, places, stacks, np.full(len(stacks), scale))
    _bars(right, places, stacks, totals / 100)
    captured = {graph.width: graph.total_us for graph in graphs}
    for place, (width, total) in enumerate(zip(widths, totals, strict=True)):
        label = f" {_time(float(total))}"
        if width in captured:
            left.plot([captured[width] / scale], [place], "k|", markersize=22, markeredgewidth=2)
            label += f" ({_time(captured[width])} in a graph)"
        left.annotate(label, (total / scale, place), va="center", fontsize=9)
    left.set_yticks(places, [f"{width} token{'s' * (width != 1)}" for width in widths])
    left.invert_yaxis()
    left.set_xlim(0, 1.3 * float(totals.max()) / scale)
    left.set_xlabel(f"all MLP layers of one call, {unit}")
    right.set_xlabel("share of the time, %")
    right.set_xlim(0, 100)
    _legend(figure, *left.get_legend_handles_labels())
    return png(figure)


def layers(rows: Sequence[Row]) -> bytes:
    """A panel for each width, at most four of them: a bar for each layer, by span."""
    chosen = list(by_width(rows).items())
    if len(chosen) > _MOST_PANELS:
        chosen = [chosen[i] for i in np.linspace(0, len(chosen) - 1, _MOST_PANELS).astype(int)]
    figure = figure_of(0.9 + 2.3 * len(chosen))
    panels = figure.subplots(len(chosen), 1, sharex=True, squeeze=False)[:, 0]
    for panel, (width, of_width) in zip(panels, chosen, strict=True):
        bottom = np.zeros(len(of_width))
        at = [row.layer for row in of_width]
        scale, unit = _scale(max(row.call_us for row in of_width))
        for name in (*columns(of_width), "rest"):
            values = np.array([_stack([row]).get(name, 0.0) / scale for row in of_width])
            panel.bar(at, values, 0.8, bottom, color=_color(name), label=name)
            bottom += values
        panel.set_title(f"{width} token{'s' * (width != 1)} a call", fontsize=10, loc="left")
        panel.set_ylabel(unit)
        panel.grid(axis="y", alpha=0.25)
    panels[-1].set_xlabel("layer")
    ticks = [row.layer for row in chosen[0][1]]
    panels[-1].set_xticks(ticks[:: -(-len(ticks) // 40)])
    named = {
        label: handle
        for panel in panels
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    order = [name for name in (*NAMES, "rest") if name in named]
    handles = [named[name] for name in order]
    _legend(figure, handles, order)
    return png(figure)


def _stack(rows: Sequence[Row]) -> dict[str, float]:
    """Span -> microseconds on the calls' own streams, of all rows; they add up to the calls."""
    found = {}
    for name in columns(rows):
        own = sum(row.us.get(name, 0.0) - row.beside_us.get(name, 0.0) for row in rows)
        if own > 0:
            found[name] = own
    found["rest"] = max(0.0, sum(row.rest_us for row in rows))
    return found


def _bars(panel: Any, places: Any, stacks: Sequence[Mapping[str, float]], unit: Any) -> None:
    """Horizontal stacked bars, values over `unit`."""
    begin = np.zeros(len(stacks))
    for name in [n for n in (*NAMES, "rest") if any(n in stack for stack in stacks)]:
        values = np.array([stack.get(name, 0.0) for stack in stacks]) / unit
        panel.barh(places, values, 0.7, begin, color=_color(name), label=name)
        begin += values
    panel.grid(axis="x", alpha=0.25)


def _legend(figure: Any, handles: Sequence[Any], names: Sequence[str]) -> None:
    """Above the panels, in one row of up to nine, else in two."""
    columns_of_it = len(names) if len(names) <= 9 else -(-len(names) // 2)
    where = {"loc": "outside upper center", "ncols": columns_of_it}
    figure.legend(handles, names, fontsize=9, columnspacing=1.2, **where)


def _scale(most_us: float) -> tuple[float, str]:
    """Microseconds of the unit in which values up to this one are short, and its name."""
    return (1000.0, "milliseconds") if most_us >= 5000 else (1.0, "microseconds")


def _color(name: str) -> Any:
    from matplotlib import colormaps

    return _REST if name == "rest" else colormaps["tab20"](_COLORS[name])


def _time(us: float) -> str:
    return f"{us / 1e3:,.2f} ms" if us >= 1000 else f"{us:,.0f} µs"
