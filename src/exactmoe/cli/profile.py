"""`exactmoe profile PATH`: how long each step of each layer takes, over the width of a call."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any

import typer
from torch import Tensor

from exactmoe.cli import options
from exactmoe.cli.output import open_checkpoint, print_json, print_table, status
from exactmoe.cli.verify import PROMPT
from exactmoe.proof import fingerprint
from exactmoe.proof.replay import Block, recording
from exactmoe.report.profile_model import ModelProfile, Running, profile_model
from exactmoe.report.profile_page import write
from exactmoe.report.profile_tables import by_width, lost_line, summed, tables

WIDTHS = "1,8,64"


def command(
    path: options.Path,
    running: options.Running,
    widths: Annotated[str, typer.Option(metavar="LIST", help="Tokens a call.")] = WIDTHS,
    calls: Annotated[int, typer.Option(min=1, help="Calls for each width.")] = 10,
    text: Annotated[
        str | None, typer.Option(metavar="FILE", help="Text that runs; by default some code.")
    ] = None,
    trace: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write a trace that Perfetto opens.")
    ] = None,
    html: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write a page with pictures, and PNGs.")
    ] = None,
) -> None:
    """Say where the time of a call goes, step by step.

    Each step of every MLP layer over the width of a call; on a card also captured in CUDA graphs.
    """
    asked = options.integers("--widths", widths, options.MOST_WIDTH)
    options.require_writable("--trace", trace)
    options.require_writable("--html", html)
    content = PROMPT if text is None else options.text_of("--text", text)
    settings = running.settings()
    folder = open_checkpoint(path, running.numerics).path
    # transformers takes seconds to import: what is wrong above is said at once.
    from exactmoe.hf import blocks, load_model
    from exactmoe.hf.text import load_tokenizer, prompt_ids, quiet, run_prompt

    if not running.debug:
        quiet()
    ids = prompt_ids(load_tokenizer(folder), content)
    with status(not running.json) as say:
        say(f"loading {path}")
        model = load_model(str(folder), **settings, progress=False)
        found = profile_model(
            _running(path, model, blocks(model), run_prompt), ids, asked, calls, say
        )
    files = []
    if trace is not None:
        found.profiled.save_trace(trace)
        files.append(trace)
    if html is not None:
        files += write(html, found)
    if running.json:
        print_json({**found.to_dict(), "files": files})
    else:
        _show(found, files)


def _running(
    path: str, model: Any, blocks: Sequence[Block], run: Callable[[Any, Tensor], Any]
) -> Running:
    @contextmanager
    def record() -> Iterator[Sequence[Callable[[], Any]]]:
        again: list[Callable[[], Any]] = []
        with recording(blocks) as recorded:
            yield again
        again += [partial(call.entry, call.batch) for call in recorded]

    return Running(
        name=path,
        machine=fingerprint(blocks[0][2].device),
        layers={index: layer for index, _, layer in blocks},
        forward=partial(run, model),
        recording=record,
    )


def _show(found: ModelProfile, files: list[str]) -> None:
    rows = found.profiled.rows()
    for table in tables(rows, found.profiled.graphs()):
        print_table(table)
    for width, of_width in by_width(rows).items():
        mlp, whole = summed(of_width)["call"], found.model_us[width]
        typer.echo(
            f"{width} token{'s' * (width != 1)} a call: MLP layers {mlp / 1e3:,.2f} ms of "
            f"{whole / 1e3:,.2f} ms of the whole model ({100 * mlp / whole:.0f} %)"
        )
    if found.profiled.lost:
        typer.echo(lost_line(found.profiled.lost))
    for file in files:
        typer.echo(file)
