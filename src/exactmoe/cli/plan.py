"""`exactmoe plan PATH --cards 96GiB,96GiB`: what lies on each card, and what would fit."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from exactmoe.checkpoint.model_bytes import ModelBytes, of_checkpoint, of_config
from exactmoe.cli import options
from exactmoe.cli.output import folder_of, print_json, print_table
from exactmoe.errors import ConfigError
from exactmoe.fitting import ARENAS, ModelPlan, Setting, plan_model
from exactmoe.formats import BLOCK
from exactmoe.report.plan import Floor, floors
from exactmoe.report.plan_page import write
from exactmoe.runtime.sizes import gb, gib, parse_all_bytes, parse_bytes, parse_rates

DOES_NOT_FIT = 2
# "96" for 96GiB is 96 bytes.
_LEAST_CARD = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Asked(options.Common):
    """What takes memory beside the MLP weights."""

    rows: Annotated[int, typer.Option(help="Tokens a piece of a call.")] = 4096
    kv_reserve: Annotated[
        str,
        typer.Option(metavar="BYTES", help="Kept for the KV cache: on the first card, or of each."),
    ] = "8GiB"
    other: Annotated[
        str | None,
        typer.Option(metavar="BYTES", help="Attention, embeddings, norms; by default from files."),
    ] = None


def command(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="Checkpoint folder, or a config.json alone.")
    ],
    cards: Annotated[
        str, typer.Option(metavar="BYTES", help="Free memory of each card, such as 96GiB,96GiB.")
    ],
    asked: Asked,
    format: Annotated[
        str | None, typer.Option(help="Of the routed experts; by default as they are stored.")
    ] = None,
    read_rate: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="Read rate of each card, such as 4.5TB/s, for floors."),
    ] = None,
    numerics: options.NumericsClass = None,
    html: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write a page with its picture, and a PNG.")
    ] = None,
) -> None:
    """Say where a model fits: nothing is loaded, nothing runs.

    From the headers of a checkpoint, or from a bare config.json.
    """
    free = parse_all_bytes("--cards", cards)
    if min(free) < _LEAST_CARD:
        raise ConfigError(
            f"--cards is {cards!r}, a card of {min(free)} bytes; allowed: sizes with a unit, such "
            "as 96GiB"
        )
    options.require_writable("--html", html)
    rates = None if read_rate is None else parse_rates("--read-rate", read_rate)
    if format is not None and format not in BLOCK:
        raise ConfigError(f"--format is {format!r}; allowed: {', '.join(BLOCK)}")
    model = _model(path, options.checked_numerics(numerics), format)
    given = None if asked.other is None else parse_bytes("--other", asked.other)
    if asked.rows < 1:
        raise ConfigError(f"--rows is {asked.rows}; allowed: from 1")
    if rates is not None and len(rates) not in (1, len(free)):
        raise ConfigError(
            f"--read-rate is {read_rate!r} for {len(free)} cards; allowed: one rate, or one a card"
        )
    setting = Setting(
        model=model,
        free_bytes=free,
        rows=asked.rows,
        kv_reserve=_reserves(asked.kv_reserve, len(free)),
        other_bytes=(model.other_bytes or 0) if given is None else given,
    )
    plan = plan_model(setting)
    steps = floors(plan, rates) if rates is not None and plan.partition is not None else []
    counted = given is not None or model.other_bytes is not None
    files = [] if html is None else write(html, plan, steps, counted)
    if asked.json:
        print_json({**plan.to_dict(), "floors": [step.__dict__ for step in steps], "files": files})
    else:
        _show(plan, steps, counted)
        for file in files:
            typer.echo(file)
    if plan.partition is None:
        raise typer.Exit(DOES_NOT_FIT)


def _model(path: str, numerics: str | None, format: str | None) -> ModelBytes:
    if Path(path).is_file():
        return of_config(path, numerics, format)
    if Path(path).is_dir() and not any(Path(path).glob("*.safetensors")):
        return of_config(Path(path) / "config.json", numerics, format)
    return of_checkpoint(folder_of(path), numerics, format)


def _reserves(text: str, num_cards: int) -> tuple[int, ...]:
    given = parse_all_bytes("--kv-reserve", text)
    if len(given) == 1:
        return given + (0,) * (num_cards - 1)
    if len(given) != num_cards:
        raise ConfigError(
            f"--kv-reserve is {text!r} for {num_cards} cards; allowed: one size (of the first "
            "card), or one a card"
        )
    return given


def _show(plan: ModelPlan, steps: list[Floor], counted: bool) -> None:
    model = plan.setting.model
    typer.echo(f"{model.name}: {model.model_type}, from {model.source}")
    typer.echo(
        f"routed experts {gb(model.routed_bytes)} ({model.format}), dense MLPs, shared experts and "
        f"routers {gb(model.mlp_bytes)}"
    )
    print_table(_table(plan))
    if not counted:
        typer.echo(
            "not counted: attention, embeddings and norms, which a config does not size; give them "
            "with --other"
        )
    if plan.partition is None:
        typer.echo(f"DOES NOT FIT: {gib(plan.missing)} are missing. One of these would fit:")
        for change in plan.would_fit or ("nothing that was tried",):
            typer.echo(f"  {change}")
        return
    for card, (owned, nbytes) in enumerate(zip(plan.partition.experts, plan.cards, strict=True)):
        typer.echo(
            f"card {card}: experts {owned[0]} to {owned[-1]} of every layer ({len(owned)}, "
            f"{gib(nbytes.experts)})"
        )
    for step in steps:
        typer.echo(
            f"floor of the MLP layers, {step.tokens} tokens a step: {1e3 * step.seconds:.2f} "
            f"ms ({step.distinct:.1f} distinct experts a layer under uniform routing)"
        )
    typer.echo("fits" if counted else "fits, without what is not counted")


def _table(plan: ModelPlan) -> Table:
    title = f"memory of each card, {plan.setting.rows} tokens a piece of a call"
    made = Table(title=title, title_justify="left")
    made.add_column("")
    for card in range(len(plan.cards)):
        made.add_column(f"card {card}", justify="right")
    rows = {
        "free": [card.free for card in plan.cards],
        "routed experts": [card.experts for card in plan.cards],
        "dense parts and routers": [card.dense for card in plan.cards],
        "attention, embeddings, norms": [card.other for card in plan.cards],
        f"workspace ({ARENAS}: calls, graphs)": [card.workspace for card in plan.cards],
        "left": [card.left for card in plan.cards],
        "of it kept for the KV cache": [card.kv_reserve for card in plan.cards],
    }
    for name, values in rows.items():
        made.add_row(name, *map(gib, values))
    return made
