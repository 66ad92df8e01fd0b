"""`exactmoe verify PATH`: known answers, layers over every dimension, and a replayed prompt."""

import pathlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from exactmoe.cli import options
from exactmoe.cli.output import open_checkpoint, print_json, print_table, status
from exactmoe.cli.over_ranks import is_first, others_failed
from exactmoe.dense import DenseMLP
from exactmoe.errors import ConfigError
from exactmoe.layer import MoELayer
from exactmoe.proof import (
    Agreement,
    Other,
    Report,
    Vector,
    fingerprint,
    recording,
    replay,
    table,
    vectors_of,
    verify,
)
from exactmoe.proof.batch import Entry
from exactmoe.proof.known_answers import known_answers
from exactmoe.proof.replay import Block
from exactmoe.proof.vectors import DIFFERS
from exactmoe.report.proof_page import proof_page

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


@dataclass(frozen=True, kw_only=True)
class Subjects(options.Running):
    """What is proved, and with which numbers."""

    layers: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Layers to prove; by default the first of each kind."),
    ] = None
    all_layers: Annotated[bool, typer.Option("--all", help="Prove every layer.")] = False
    widths: Annotated[
        str | None, typer.Option(metavar="LIST", help="Tokens a call, separated by commas.")
    ] = None
    prompt: Annotated[
        str | None, typer.Option(help="Text whose MLP inputs are recorded and replayed.")
    ] = None
    seed: Annotated[
        int, typer.Option(min=0, max=options.MOST_SEED, help="Chooses the inputs of the layers.")
    ] = 0


@dataclass(frozen=True)
class Proof:
    """All that was found.

    Attributes:
        path: of the model, as it was given.
        machine: fingerprint of the device.
        reports: known answers, layers, replay.
        vectors: what another machine compares.
        texts: chunk -> whether the whole model's text is the same; it decides nothing.
        agreement: with another machine, where --against was given.
        others: over ranks, what the other ranks found to differ, a line each.
    """

    path: str
    machine: dict[str, Any]
    reports: list[Report]
    vectors: dict[str, Vector]
    texts: dict[int, bool]
    agreement: Agreement | None
    others: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether no report failed on any rank, and no vector differs that must not."""
        agreed = self.agreement is None or self.agreement.ok
        return agreed and not self.others and not any(report.failed for report in self.reports)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and the page."""
        parts = [{k: v for k, v in r.to_dict().items() if k != "machine"} for r in self.reports]
        against = {} if self.agreement is None else {"against": self.agreement.to_dict()}
        return {
            "path": self.path,
            "ok": self.ok,
            "machine": self.machine,
            "reports": parts,
            "vectors": {name: vector.to_dict() for name, vector in self.vectors.items()},
            "same_text": self.texts,
            "other_ranks": list(self.others),
            **against,
        }


def command(
    path: options.Path,
    running: Subjects,
    against: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="What `verify --json` gave elsewhere: is it equal here?"),
    ] = None,
    html: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the proof as a page as well.")
    ] = None,
) -> None:
    """Prove by bytes that a token's bits do not depend on its call."""
    asked_widths = None if running.widths is None else _widths(running.widths)
    asked_layers = None if running.layers is None else options.integers("--layers", running.layers)
    if running.all_layers and running.layers is not None:
        raise ConfigError("--all and --layers were both given; allowed: one of them")
    other = None if against is None else Other.read(against)
    options.require_writable("--html", html)
    settings = running.settings(over_ranks=True)
    speaks = is_first(settings)
    checkpoint = open_checkpoint(path, running.numerics)
    folder = checkpoint.path
    # transformers takes seconds to import: what is wrong above is said at once.
    from exactmoe.hf import blocks, load_model
    from exactmoe.hf.text import (
        check_positions_of,
        load_tokenizer,
        prompt_ids,
        quiet,
        run_prompt,
        same_text,
    )

    if not running.debug:
        quiet()
    with status(speaks and not running.json) as say:
        say(f"loading {path}")
        tokenizer = load_tokenizer(folder)
        ids = prompt_ids(tokenizer, PROMPT if running.prompt is None else running.prompt)
        check_positions_of(checkpoint.config, ids.shape[1])
        model = load_model(str(folder), **settings, progress=False)
        found = blocks(model)
        say("known answers")
        device = found[0][2].device
        reports = [known_answers(running.backend, progress=say, device=device)]
        vectors: dict[str, Vector] = {}
        for index, layer in chosen(found, asked_layers, running.all_layers):
            subject, seed = f"layer {index}: {kind_of(layer)}", running.seed
            reports.append(
                verify(layer, widths=asked_widths, seed=seed, subject=subject, progress=say)
            )
            vectors |= vectors_of(layer, subject, seed)
        say("recording the prompt")
        with recording(found) as calls:
            run_prompt(model, ids)
        reports.append(replay(calls, progress=say))
        say("generating after chunked prompts")
        texts = same_text(model, tokenizer, ids[:, :TEXT_PROMPT], TEXT_NEW, TEXT_CHUNKS)
    machine = fingerprint(device)
    agreement = None if other is None else Agreement.of(machine, vectors, other)
    others = others_failed(settings, reports)
    proof = Proof(path, machine, reports, vectors, texts, agreement, others)
    if not speaks:
        raise typer.Exit(0 if proof.ok else MISMATCH)
    show(proof, running.json)
    if html is not None:
        _write_page(html, proof)
    if not proof.ok:
        raise typer.Exit(MISMATCH)


def _widths(text: str | None) -> tuple[int, ...] | None:
    return None if text is None else options.integers("--widths", text, options.MOST_WIDTH)


def _write_page(file: str, proof: Proof) -> None:
    """After the proof was shown: a full disk must not cost it."""
    try:
        pathlib.Path(file).write_text(proof_page(proof.to_dict()), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html {file} cannot be written: {error}") from error


def chosen(
    found: Sequence[Block], asked: tuple[int, ...] | None, every: bool
) -> list[tuple[int, MoELayer | DenseMLP]]:
    """The layers to prove: the asked ones, all, or the first of each kind."""
    layers = {index: layer for index, _, layer in found}
    if asked is not None:
        wrong = [index for index in asked if index not in layers]
        if wrong:
            raise ConfigError(f"--layers has {wrong}; allowed: {sorted(layers)}")
        return [(index, layers[index]) for index in dict.fromkeys(asked)]
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


def show(proof: Proof, json: bool) -> None:
    """Print the proof."""
    if json:
        print_json(proof.to_dict())
    else:
        _show_text(proof)
    for report in proof.reports:
        for difference in report.differences:
            typer.echo(f"{report.subject}: {difference}", err=True)
        for excess in report.excesses:
            typer.echo(f"{report.subject}: {excess}", err=True)
    for line in proof.others:
        typer.echo(line, err=True)
    for one in () if proof.agreement is None else proof.agreement.compared:
        if one.result == DIFFERS:
            typer.echo(str(one), err=True)


def _show_text(proof: Proof) -> None:
    reports = proof.reports
    print_table(table(reports))
    typer.echo("machine: " + ", ".join(f"{name} {value}" for name, value in proof.machine.items()))
    told = ", ".join(
        f"{chunk}: {'the same' if same else 'differs'}" for chunk, same in proof.texts.items()
    )
    typer.echo(
        "told, not required: the whole model's greedy text after a prompt in chunks of "
        f"{told} (attention and norms are transformers' and may depend on the width)"
    )
    rows, nbytes = (sum(getattr(r, n) for r in reports) for n in ("comparisons", "nbytes"))
    seconds = sum(report.seconds for report in reports)
    verdict = "ANOTHER RANK FAILED" if proof.others else _verdict(reports)
    typer.echo(f"{verdict}: {rows:,} rows, {nbytes:,} bytes compared in {seconds:.1f} s")
    if proof.agreement is not None:
        _show_agreement(proof.agreement)


def _show_agreement(agreement: Agreement) -> None:
    for one in agreement.compared:
        typer.echo(f"  {one}")
    counts = ", ".join(f"{count} {result}" for result, count in agreement.counts().items())
    there = agreement.other.machine["architecture"]
    typer.echo(
        f"{'agrees' if agreement.ok else 'DOES NOT AGREE'} with {agreement.other.name} ({there}): "
        f"{counts}, {agreement.nbytes:,} bytes"
    )
