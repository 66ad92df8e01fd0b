"""The plot of a benchmark: time, and share of the floor, over the width."""

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from exactmoe.bench.record import EXPERTS, OURS, Record
from exactmoe.errors import Unsupported

_SIZE = (13.0, 5.5)
_DPI = 130
_COLOR = "tab:red"  # ours; the others' are not near it
_OTHERS = ("tab:blue", "tab:orange", "tab:green", "tab:purple", "tab:cyan", "tab:olive", "tab:gray")


def write_plot(path: str, records: Sequence[Record], title: str) -> None:
    """Two panels as a picture; the suffix of `path` is its format (.png, .svg, .pdf).

    Raises:
        Unsupported: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise Unsupported(
            "--plot needs matplotlib, which is not installed: pip install 'exactmoe[plot]'"
        ) from None
    figure = Figure(figsize=_SIZE, dpi=_DPI, layout="constrained")
    times, shares = figure.subplots(1, 2)
    lines = curves(records)
    ours = lines.get(OURS, [])
    times.plot(
        [r.tokens for r in ours],
        [r.floor_us for r in ours],
        color="black",
        linestyle="--",
        label="floor (measured reads and products)",
    )
    colors = cycle(_OTHERS)
    for what, points in lines.items():
        style: dict[str, Any] = {"marker": "o", "markersize": 4, "label": what}
        if what == OURS:
            style |= {"color": _COLOR, "linewidth": 2.5, "zorder": 3}
        else:
            style["color"] = next(colors)
        widths = [r.tokens for r in points]
        times.plot(widths, [r.us for r in points], **style)
        shares.plot(widths, [100 * (r.share or 0) for r in points], **style)
    for panel, label in ((times, "us, routed experts"), (shares, "share of the floor, %")):
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xlabel("tokens")
        panel.set_ylabel(label)
        panel.grid(which="both", alpha=0.25)
        widths = sorted({r.tokens for points in lines.values() for r in points})
        panel.set_xticks(widths, [str(width) for width in widths], rotation=45)
        panel.minorticks_off()
    ticks = [10, 20, 30, 40, 50, 60, 70, 80, 90, 100]
    shares.set_yticks(ticks, [str(tick) for tick in ticks])
    times.legend(fontsize=8)
    figure.suptitle(title)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def curves(records: Sequence[Record]) -> dict[str, list[Record]]:
    """What -> its points over the width, sort made before; ours first."""
    found: dict[str, list[Record]] = {}
    for record in records:
        if record.part == EXPERTS and record.timing is not None and record.tokens:
            found.setdefault(record.what, []).append(record)
    return {what: sorted(points, key=lambda r: r.tokens) for what, points in found.items()}
