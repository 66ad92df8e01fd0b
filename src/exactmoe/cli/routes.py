"""`exactmoe routes PATH --text FILE`: which experts a text uses, what calls share, who is busy."""

from pathlib import Path
from typing import Annotated, Any

import typer

from exactmoe.cli import options
from exactmoe.cli.output import open_checkpoint, print_json, status
from exactmoe.errors import ConfigError
from exactmoe.layer import MoELayer
from exactmoe.report.route_files import SUFFIXES, Facts
from exactmoe.report.route_load import read_placement
from exactmoe.report.route_page import Findings, examine, require_examinable, write
from exactmoe.report.route_trace import CAPACITY, RouteTrace, tracing

# Tokens of a text that run in one call.
_WINDOW = 512
KINDS = tuple(suffix.removeprefix(".") for suffix in SUFFIXES)


def command(
    path: options.Path,
    running: options.Running,
    text: Annotated[
        str | None, typer.Option(metavar="FILE", help="Text whose routes are recorded.")
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="A trace, .npz or .parquet, that was recorded before."),
    ] = None,
    out: Annotated[str, typer.Option(metavar="FOLDER", help="Where the files go.")] = "routes",
    save_as: Annotated[
        str, typer.Option(metavar="npz|parquet", help="Kind of file of a text's trace.")
    ] = "npz",
    over: Annotated[int, typer.Option(min=1, help="Cards that a placement is made for.")] = 2,
    placement: Annotated[
        str | None, typer.Option(metavar="FILE", help="A placement.json to measure as well.")
    ] = None,
) -> None:
    """Draw which experts a text uses, and write a placement."""
    if (text is None) == (trace is None):
        raise ConfigError("--text and --trace: allowed is one of them, and one is needed")
    if save_as not in KINDS:
        raise ConfigError(f"--save-as is {save_as!r}; allowed: {', '.join(KINDS)}")
    options.require_folder("--out", out)
    given = {} if placement is None else {Path(placement).name: read_placement(placement)}
    folder, files = Path(out), []
    with status(not running.json) as say:
        if trace is not None:
            recorded = _loaded(path, trace)
        else:
            recorded = _recorded(path, str(text), running, (over, given))
            folder.mkdir(parents=True, exist_ok=True)
            file = folder / f"routes.{save_as}"
            recorded.save(file)
            files.append(str(file))
        say("examining the routes")
        found = examine(recorded, over, given)
        files = write(folder, Path(path).name, found, over) + files
    if running.json:
        print_json({"path": path, "cards": over, "files": files, **found.to_dict()})
    else:
        _show(found, over, files)


def _loaded(path: str, file: str) -> RouteTrace:
    """A trace of this model: one of another would be drawn under a wrong name."""
    family = open_checkpoint(path).family
    known = {
        spec.layer: Facts(spec.moe.num_experts, spec.routing == "hash")
        for spec in family.layers
        if spec.moe is not None
    }
    trace = RouteTrace.load(file, known)
    asked = {layer: facts.num_experts for layer, facts in known.items()}
    found = {layer: routes.num_experts for layer, routes in trace.layers.items()}
    wrong = {layer: count for layer, count in found.items() if asked.get(layer) != count}
    if wrong:
        raise ConfigError(
            f"the trace has (layer: experts) {wrong}; {path} has {asked}: it is of another model"
        )
    return trace


def _recorded(
    path: str, file: str, running: options.Running, asked: tuple[int, dict[str, Any]]
) -> RouteTrace:
    """asked: cards, and placements by name, that the trace has to fit."""
    settings = running.settings()
    checkpoint = open_checkpoint(path, running.numerics)
    folder = checkpoint.path
    content = options.text_of("--text", file)
    # transformers takes seconds to import: what is wrong above is said at once.
    from exactmoe.hf import blocks, load_model
    from exactmoe.hf.text import load_tokenizer, prompt_ids, quiet, run_prompt

    if not running.debug:
        quiet()
    ids = prompt_ids(load_tokenizer(folder), content)
    experts = {s.layer: s.moe.num_experts for s in checkpoint.family.layers if s.moe is not None}
    require_examinable(ids.shape[1], experts, *asked)
    model = load_model(str(folder), **settings, progress=False)
    layers = {index: lay for index, _, lay in blocks(model) if isinstance(lay, MoELayer)}
    with tracing(layers, min(ids.shape[1], CAPACITY)) as read:
        for first in range(0, ids.shape[1], _WINDOW):
            run_prompt(model, ids[:, first : first + _WINDOW])
    return read()


def _show(found: Findings, over: int, files: list[str]) -> None:
    typer.echo(f"{found.tokens:,} tokens")
    for row in found.layers():
        lost = f", {row['lost']:,} tokens lost" if row["lost"] else ""
        typer.echo(
            f"layer {row['layer']} ({row['routing']}): expert {row['busiest']} has "
            f"{row['busiest_load']:.2f} times the mean load, {row['never']} of {row['experts']} "
            f"are never used{lost}"
        )
    typer.echo(
        "distinct experts a layer (under uniform routing): "
        + ", ".join(
            f"{width} tokens {found.union[width]:.1f} ({found.uniform[width]:.1f})"
            for width in (2, 4, 8, 16)
        )
    )
    for part in found.shares:
        told = ", ".join(
            f"{100 * share:.1f} % at {width}" for width, share in part.by_width.items()
        )
        typer.echo(f"busiest of {over} cards, placement {part.name}: {told} tokens a call")
    for file in files:
        typer.echo(file)
