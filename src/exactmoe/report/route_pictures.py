"""The pictures of a trace, as PNGs."""

from collections.abc import Mapping, Sequence

import numpy as np

from exactmoe.report.drawing import figure_of, png
from exactmoe.report.route_load import WIDTHS, Counted, Shares


def load_map(layers: Mapping[int, Counted]) -> bytes:
    """A row a layer, a column an expert: its load over the mean of the layer.

    Raises:
        Unsupported: matplotlib is not installed.
    """
    figure = figure_of(1.8 + min(0.42 * len(layers), 9.0))
    from matplotlib import colors, ticker

    most = max(routes.num_experts for routes in layers.values())
    table = np.full((len(layers), most), np.nan)
    for row, routes in enumerate(layers.values()):
        table[row, : routes.num_experts] = routes.relative_load
    panel = figure.subplots()
    top = max(2.0, float(np.nanmax(table)))
    norm = colors.TwoSlopeNorm(vmin=0, vcenter=1, vmax=top)
    image = panel.imshow(table, aspect="auto", cmap="RdBu_r", norm=norm, interpolation="nearest")
    bar = figure.colorbar(image, ax=panel, pad=0.01)
    bar.set_label("blue: less, white: average, red: more", labelpad=8)
    bar.set_ticks([0, 0.5, 1, *np.linspace(1, top, 4)[1:]])
    bar.ax.yaxis.set_major_formatter("{x:.1f} x")
    names = [f"{i}{' (hash)' if r.is_hashed else ''}" for i, r in layers.items()]
    panel.set_yticks(range(len(names)), names)
    panel.set_xlabel("expert")
    panel.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    panel.set_ylabel("layer")
    tokens = max(routes.tokens for routes in layers.values())
    panel.set_title(f"How often each expert is chosen ({tokens:,} tokens)")
    return png(figure)


def union_curves(layers: Mapping[int, Counted]) -> bytes:
    """Distinct experts of 1 to 16 consecutive tokens: each layer, their mean, uniform routing."""
    figure = figure_of(5.5)
    panel = figure.subplots()
    lines = np.array([r.unions for r in layers.values()])
    told = set()
    for routes, line in zip(layers.values(), lines, strict=True):
        kind = "hash layers (by token)" if routes.is_hashed else "each layer"
        color = "tab:green" if routes.is_hashed else "tab:blue"
        label = None if kind in told else kind
        panel.plot(WIDTHS, line, color=color, alpha=0.45, linewidth=1, label=label)
        told.add(kind)
    panel.plot(WIDTHS, lines.mean(0), "o-", color="tab:blue", linewidth=2.5, label="mean of layers")
    uniform = np.array([r.uniform_unions for r in layers.values()]).mean(0)
    panel.plot(WIDTHS, uniform, "--", color="black", label="uniform routing")
    experts = max(routes.num_experts for routes in layers.values())
    panel.axhline(experts, color="gray", linewidth=1)
    panel.annotate(f"all {experts} experts", (1, experts), va="bottom", color="gray")
    panel.set_xticks(WIDTHS)
    panel.set_ylim(0, 1.1 * experts)
    panel.set_xlabel("consecutive tokens in one call")
    panel.set_ylabel("distinct experts a layer reads")
    panel.grid(alpha=0.25)
    panel.legend(loc="lower right")
    panel.set_title("How many experts a call must read")
    return png(figure)


def share_bars(found: Sequence[Shares], num_cards: int) -> bytes:
    """Share of the busiest card, for each placement and width of a call."""
    figure = figure_of(5.0)
    panel = figure.subplots()
    widths = sorted({width for part in found for width in part.by_width})
    size = 0.8 / len(found)
    for place, part in enumerate(found):
        at = np.arange(len(widths)) + (place - (len(found) - 1) / 2) * size
        values = [100 * part.by_width.get(width, np.nan) for width in widths]
        bars = panel.bar(at, values, 0.92 * size, label=part.name)
        panel.bar_label(bars, fmt="%.1f", fontsize=9, padding=2)
    best = 100 / num_cards
    panel.axhline(best, color="black", linestyle="--", linewidth=1, label=f"best: {best:.1f} %")
    panel.set_xticks(range(len(widths)), [f"{w} token{'s' * (w > 1)}" for w in widths])
    panel.set_xlabel("tokens in a call")
    panel.set_ylabel("slots on the busiest card, %")
    panel.set_ylim(0, 1.3 * max(value for part in found for value in part.by_width.values()) * 100)
    panel.grid(axis="y", alpha=0.25)
    panel.legend(loc="upper right", ncols=min(len(found) + 1, 4))
    panel.set_title(f"How evenly {num_cards} cards share the work (lower is better)")
    return png(figure)
