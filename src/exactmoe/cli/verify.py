"""`exactmoe verify PATH`: known answers, layers over every dimension, and a replayed prompt."""

from collections.abc import Sequence
from typing import Annotated

import torch
import typer

from exactmoe.cli import options
from exactmoe.cli.output import console, open_checkpoint, print_json, status
from exactmoe.dense import DenseMLP
from exactmoe.errors import ConfigError
from exactmoe.layer import MoELayer
from exactmoe.proof import Report, fingerprint, recording, replay, table, verify
from exactmoe.proof.batch import Entry
from exactmoe.proof.known_answers import known_answers
from exactmoe.proof.replay import Block

MISMATCH = 1
# The whole model's text is compared on a shorter prompt: it runs token by token.
TEXT_PROMPT, TEXT_NEW, TEXT_CHUNKS = 64, 24, (1, 8)
# Some text with code in it: a few hundred tokens, so that chunks of 64 have borders.
PROMPT = '''\
def parse_lines(path, encoding="utf-8"):
    """Read a file of `name = value` lines; comments start with a number sign."""
    result = {}
    with open(path, encoding=encoding) as handle:
        for number, line in enumerate(handle, start=1):
            line = line.partition("#")[0].strip()
            if not line:
                continue
            name, separator, value = line.partition("=")
            if not separator:
                raise ValueError(f"{path}, line {number}: no value for {name!r}")
            result[name.strip()] = value.strip()
    return result


class Table:
    def __init__(self, columns, rows=()):
        self.columns = tuple(columns)
        self.rows = [tuple(row) for row in rows]

    def __len__(self):
        return len(self.rows)

    def select(self, name, value):
        index = self.columns.index(name)
        return Table(self.columns, [row for row in self.rows if row[index] == value])
'''


def command(
    path: options.Path,
    running: options.Running,
    layers: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Layers to prove; by default the first of each kind."),
    ] = None,
    all_layers: Annotated[bool, typer.Option("--all", help="Prove every layer.")] = False,
    widths: Annotated[
        str | None, typer.Option(metavar="LIST", help="Tokens a call, separated by commas.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="Text whose MLP inputs are recorded and replayed.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Chooses the inputs of the layers.")] = 0,
) -> None:
    """Prove, byte by byte, that a token's bits do not depend on its call."""
    asked_widths = None if widths is None else options.integers("--widths", widths)
    asked_layers = None if layers is None else options.integers("--layers", layers)
    if all_layers and layers is not None:
        raise ConfigError("--all and --layers were both given; allowed: one of them")
    settings = running.settings()
    folder = open_checkpoint(path, running.numerics).path
    # transformers takes seconds to import: what is wrong above is said at once.
    from exactmoe.hf import blocks, load_model
    from exactmoe.hf.text import (
        check_positions,
        load_tokenizer,
        prompt_ids,
        quiet,
        run_prompt,
        same_text,
    )

    if not running.debug:
        quiet()
    with status(not running.json) as say:
        say(f"loading {path}")
        tokenizer = load_tokenizer(folder)
        ids = prompt_ids(tokenizer, PROMPT if prompt is None else prompt)
        model = load_model(str(folder), **settings, progress=False)
        check_positions(model, ids.shape[1])
        found = blocks(model)
        say("known answers")
        device = found[0][2].device
        reports = [known_answers(running.backend, progress=say, device=device)]
        for index, layer in chosen(found, asked_layers, all_layers):
            subject = f"layer {index}: {kind_of(layer)}"
            reports.append(
                verify(layer, widths=asked_widths, seed=seed, subject=subject, progress=say)
            )
        say("recording the prompt")
        with recording(found) as calls:
            run_prompt(model, ids)
        reports.append(replay(calls, progress=say))
        say("generating after chunked prompts")
        texts = same_text(model, tokenizer, ids[:, :TEXT_PROMPT], TEXT_NEW, TEXT_CHUNKS)
    show(path, reports, texts, running.json, device)


def chosen(
    found: Sequence[Block], asked: tuple[int, ...] | None, every: bool
) -> list[tuple[int, MoELayer | DenseMLP]]:
    """The layers to prove: the asked ones, all, or the first of each kind."""
    layers = {index: layer for index, _, layer in found}
    if asked is not None:
        wrong = [index for index in asked if index not in layers]
        if wrong:
            raise ConfigError(f"--layers has {wrong}; allowed: {sorted(layers)}")
        return [(index, layers[index]) for index in asked]
    if every:
        return list(layers.items())
    first: dict[str, int] = {}
    for index, layer in layers.items():
        first.setdefault(kind_of(layer), index)
    return [(index, layers[index]) for index in first.values()]


def kind_of(layer: MoELayer | DenseMLP) -> str:
    """ "dense", "hash" or "score", with the class and the format of the experts."""
    if isinstance(layer, DenseMLP):
        return f"dense, {layer.bank.gate.format}"
    kind = "hash" if Entry("block", layer).is_hashed else "score"
    return f"{kind}, {layer.numerics.activation}, {layer.bank.gate.format}"


def _verdict(reports: list[Report]) -> str:
    if any(report.mismatches for report in reports):
        return "BITS DIFFER"
    if any(report.excesses for report in reports):
        return "ERRORS ARE TOO LARGE"
    if any(report.failed for report in reports):
        return "NOTHING COMPARED"
    return "all bytes equal"


def show(
    path: str, reports: list[Report], texts: dict[int, bool], json: bool, device: torch.device
) -> None:
    """Print the proof; raises typer.Exit with status 1 if a report has failed.

    `texts` (chunk -> same text) is told and decides nothing: attention and norms are not ours.
    """
    ok, machine = not any(report.failed for report in reports), fingerprint(device)
    if json:
        parts = [{k: v for k, v in r.to_dict().items() if k != "machine"} for r in reports]
        print_json(
            {"path": path, "ok": ok, "machine": machine, "reports": parts, "same_text": texts}
        )
    else:
        out = console()
        out.print(table(reports))
        typer.echo("machine: " + ", ".join(f"{name} {value}" for name, value in machine.items()))
        told = ", ".join(
            f"{chunk}: {'the same' if same else 'differs'}" for chunk, same in texts.items()
        )
        typer.echo(
            "told, not required: the whole model's greedy text after a prompt in chunks of "
            f"{told} (attention and norms are transformers' and may depend on the width)"
        )
        rows, nbytes = (sum(getattr(r, n) for r in reports) for n in ("comparisons", "nbytes"))
        seconds = sum(report.seconds for report in reports)
        verdict = _verdict(reports)
        typer.echo(f"{verdict}: {rows:,} rows, {nbytes:,} bytes compared in {seconds:.1f} s")
    for report in reports:
        for difference in report.differences:
            typer.echo(f"{report.subject}: {difference}", err=True)
        for excess in report.excesses:
            typer.echo(f"{report.subject}: {excess}", err=True)
    if not ok:
        raise typer.Exit(MISMATCH)
