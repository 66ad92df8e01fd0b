"""The profile of a model as one HTML file with its pictures inside, and the pictures as PNGs."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from exactmoe.errors import ConfigError
from exactmoe.report import profile_pictures as pictures
from exactmoe.report.html import Section, page
from exactmoe.report.profile import GraphRow, Row
from exactmoe.report.profile_model import ModelProfile
from exactmoe.report.profile_tables import by_width, columns, lost_line, summed

# Span -> what it is, for somebody who has not read the design.
MEANINGS = {
    "router": "logits of every expert, and the choice of K of them for each token",
    "sort": "(token, expert) slots put in the order of their experts",
    "dispatch": "rows, ids and weights sent to the other cards",
    "gate_up": "gate and up of the routed experts, and SwiGLU between them",
    "quantize": "class a8: x, and later h, to FP8 codes with scales",
    "down": "down of the routed experts",
    "return": "answers of the other cards brought home",
    "shared": "the shared expert; on a GPU on a second stream beside the others",
    "combine": "slots and shared expert added in the fixed order, one rounding",
    "dense": "gate, up and down of a dense MLP",
    "finish": "its one rounding",
    "rest": "what no span covers: the host between two steps",
}


def write(path: str | Path, found: ModelProfile) -> list[str]:
    """Write the page, and its pictures beside it as NAME-steps.png and NAME-layers.png; returns
    the files.

    Raises:
        Unsupported: matplotlib is not installed.
        ConfigError: a file cannot be written, or nothing was recorded.
    """
    rows, graphs = found.profiled.rows(), found.profiled.graphs()
    if not rows:
        raise ConfigError("no call was recorded, and a page needs one")
    images = {"steps": pictures.steps(rows, graphs), "layers": pictures.layers(rows)}
    target = Path(path)
    try:
        text = page(f"Profile of {found.name}", sections(found, rows, graphs, images))
        target.write_text(text, encoding="utf-8")
        files = [str(target)]
        for name, data in images.items():
            file = target.with_name(f"{target.stem}-{name}.png")
            file.write_bytes(data)
            files.append(str(file))
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error
    return files


def sections(
    found: ModelProfile,
    rows: Sequence[Row],
    graphs: Sequence[GraphRow],
    images: dict[str, bytes],
) -> list[Section]:
    """The page: what was run, the pictures, what the spans are, tables, graphs, machine."""
    names = [*columns(rows), "rest"]
    return [
        Section("What was run", text=_told(found, rows)),
        Section(
            "Where the time of a call goes",
            text=[
                "Each bar is one call of that many tokens through all MLP layers. Left: in time; "
                "right: in shares. Times are medians over the calls."
                + (" A black stroke is the same pass as a CUDA graph." if graphs else "")
            ],
            picture=images["steps"],
            caption="Time of all MLP layers of one call by step, for each width.",
            head=("step", "what it is"),
            rows=[(name, MEANINGS[name]) for name in names],
        ),
        Section(
            "Layer by layer",
            picture=images["layers"],
            caption="Time of each layer's call by step, a panel for each width.",
        ),
        *_tables(rows),
        *_graphs(graphs),
        Section(
            "Machine",
            head=("", ""),
            rows=[(name, str(value)) for name, value in found.machine.items()],
        ),
    ]


def _told(found: ModelProfile, rows: Sequence[Row]) -> list[str]:
    layers = found.profiled.layers
    backends = ", ".join(dict.fromkeys(layer.plan().backend for layer in layers.values()))
    calls = max(row.calls for row in rows)
    lines = [
        f"{len(layers)} MLP layers (backend {backends}), up to {calls} calls for each width, over "
        "windows of a text; routes and inputs are the text's own."
    ]
    for width, of_width in by_width(rows).items():
        if width in found.model_us:
            mlp, whole = summed(of_width)["call"], found.model_us[width]
            lines.append(
                f"{width} token{'s' * (width != 1)} a call: MLP layers {mlp / 1e3:,.2f} ms of "
                f"{whole / 1e3:,.2f} ms of the whole model's forward call "
                f"({100 * mlp / whole:.0f} %), attention without a cache."
            )
    if found.profiled.lost:
        lines.append(lost_line(found.profiled.lost))
    return lines


def _tables(rows: Sequence[Row]) -> Iterator[Section]:
    for width, of_width in by_width(rows).items():
        names = columns(of_width)
        total = summed(of_width)
        yield Section(
            f"{width} token{'s' * (width != 1)} a call, microseconds",
            head=("layer", "kind", "calls", *names, "rest", "whole call"),
            rows=[
                *((f"{row.layer}", row.kind, row.calls, *_cells(row, names)) for row in of_width),
                ("all", "", "", *(round(total[name], 1) for name in (*names, "rest", "call"))),
            ],
        )


def _cells(row: Row, names: Sequence[str]) -> list[Any]:
    cells = [round(row.us[name], 1) if name in row.us else "" for name in names]
    return [*cells, round(row.rest_us, 1), round(row.call_us, 1)]


def _graphs(graphs: Sequence[GraphRow]) -> Iterator[Section]:
    if not graphs:
        return
    yield Section(
        "Captured graphs, microseconds",
        text=["One graph holds all layers of a pass; each number is a layer's call in a replay."],
        head=("graph", "tokens", "replays", *(f"layer {i}" for i in graphs[0].us), "all"),
        rows=[
            (
                str(graph.graph),
                graph.width,
                graph.replays,
                *(round(graph.us[i], 1) if i in graph.us else "" for i in graphs[0].us),
                round(graph.total_us, 1),
            )
            for graph in graphs
        ],
    )
