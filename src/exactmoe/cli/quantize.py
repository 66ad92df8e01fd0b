"""`exactmoe quantize IN OUT --format nvfp4|mxfp4`: a checkpoint with packed weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from exactmoe.checkpoint import Checkpoint
from exactmoe.checkpoint.rewrite import REPORT, QuantizeRequest, Row, quantize_checkpoint
from exactmoe.cli import options
from exactmoe.cli.output import folder_of, print_json, print_table, reading
from exactmoe.errors import ConfigError, Unsupported
from exactmoe.formats import FP4_FORMATS

Source = Annotated[str, typer.Argument(metavar="IN", help="Checkpoint folder, or a hub id.")]
Target = Annotated[str, typer.Argument(metavar="OUT", help="New folder, or one to continue.")]
Workers = Annotated[
    int | None, typer.Option(metavar="N", help="Threads; by default torch's, at most 4.")
]
_SIZE = (11.0, 5.0)
_DPI = 130


@dataclass(frozen=True, kw_only=True)
class Run(options.Common):
    """Options that change no byte of the output."""

    plot: Annotated[
        str | None, typer.Option(metavar="FILE", help="Picture of the errors (.png, .svg, .pdf).")
    ] = None
    workers: Workers = None


def command(
    source: Source,
    out: Target,
    run: Run,
    format: Annotated[str, typer.Option(metavar="nvfp4|mxfp4", help="Format of the output.")],
    what: Annotated[
        str, typer.Option(metavar="PARTS", help="routed, routed+shared, or all.")
    ] = "routed",
    rule: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="How scales are chosen: nvfp4 modelopt or four_over_six, mxfp4 ocp or no_clip.",
        ),
    ] = None,
    lossy: Annotated[
        bool, typer.Option("--lossy", help="Values may change; else only exact casts are made.")
    ] = False,
) -> None:
    """Quantise or cast weights; continues where it was stopped."""
    if format not in FP4_FORMATS:
        raise ConfigError(f"--format is {format!r}; allowed: {', '.join(FP4_FORMATS)}")
    options.require_folder("OUT", out)
    options.require_writable("--plot", run.plot, options.PICTURES)
    request = QuantizeRequest(format, rule, what, lossy)
    if run.plot is not None:
        _require_matplotlib()
    folder = folder_of(source)
    with reading(not run.json, Checkpoint(folder).nbytes) as progress:
        rows, notes = quantize_checkpoint(folder, out, request, run.workers, progress)
    if run.plot is not None:
        write_plot(run.plot, rows, f"{folder.name}: {format}, {what}")
    show(out, rows, notes, run.json)


def show(out: str, rows: Sequence[Row], notes: Sequence[str], json: bool) -> None:
    """Prints what happened: totals of each kind, and where the row of every tensor stands."""
    kinds = summary(rows)
    if json:
        print_json(
            {"out": out, "kinds": kinds, "notes": list(notes), "report": str(Path(out) / REPORT)}
        )
        return
    made = Table(title=out, title_justify="left")
    for name in ("what", "from", "to"):
        made.add_column(name)
    for name in ("weights", "exact", "SQNR dB, least", "median", "most"):
        made.add_column(name, justify="right")
    for kind in kinds:
        errors = [kind[f"sqnr_db_{name}"] for name in ("least", "median", "most")]
        texts = ["" if value is None else f"{value:.2f}" for value in errors]
        names = [kind[name] for name in ("what", "before", "after")]
        made.add_row(*names, str(kind["weights"]), str(kind["exact"]), *texts)
    print_table(made)
    for note in notes:
        typer.echo(f"note: {note}")
    typer.echo(f"every weight: {Path(out) / REPORT}")


def summary(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Weights of one part, layout before and after: how many, how many exact, SQNR of the rest."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.what, row.before, row.after), []).append(row)
    kinds = []
    for (what, before, after), group in groups.items():
        errors = sorted(row.sqnr_db for row in group if row.sqnr_db is not None)
        least, median, most = (
            (errors[0], errors[len(errors) // 2], errors[-1]) if errors else (None, None, None)
        )
        kinds.append(
            {
                "what": what,
                "before": before,
                "after": after,
                "weights": len(group),
                "exact": sum(row.exact for row in group),
                "sqnr_db_least": least,
                "sqnr_db_median": median,
                "sqnr_db_most": most,
            }
        )
    return kinds


def _require_matplotlib() -> None:
    """Before hours of work, not after them."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise Unsupported(
            "--plot needs matplotlib, which is not installed: pip install 'exactmoe[plot]'"
        ) from None


def write_plot(path: str, rows: Sequence[Row], title: str) -> None:
    """SQNR of every quantised weight in the order of the layers, one colour for each projection."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=_SIZE, dpi=_DPI, layout="constrained")
    panel = figure.subplots()
    lossy = [row for row in rows if row.sqnr_db is not None]
    series: dict[str, list[tuple[int, float]]] = {}
    for row in lossy:
        layer = next((int(word) for word in row.name.split(".") if word.isdigit()), 0)
        word = row.name.rpartition(".")[2]
        series.setdefault(f"{row.what}, {word}", []).append((layer, row.sqnr_db or 0.0))
    for number, (label, points) in enumerate(sorted(series.items())):
        offset = 0.8 * ((number + 0.5) / len(series) - 0.5)
        panel.plot(
            [layer + offset for layer, _ in points],
            [error for _, error in points],
            linestyle="none",
            marker=".",
            markersize=4,
            alpha=0.6,
            label=label,
        )
    panel.set_xlabel("layer")
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.set_ylabel("SQNR, dB (more is better)")
    panel.grid(alpha=0.25)
    if series:
        panel.legend(fontsize=8)
    exact = sum(row.exact for row in rows)
    figure.suptitle(f"{title}: {len(lossy)} weights quantised, {exact} exact")
    figure.savefig(path)
