"""`exactmoe env`: every environment switch, its value here, its default and what it does."""

from typing import Annotated

import typer
from rich.table import Table

from exactmoe.cli import options
from exactmoe.cli.output import print_json, print_table
from exactmoe.errors import ConfigError
from exactmoe.report import switches


def command(
    common: options.Common,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print docs/env.md, without this process's values.")
    ] = False,
) -> None:
    """Show the environment switches and their values here."""
    if markdown and common.json:
        raise ConfigError("--markdown and --json were both given; allowed: one of them")
    if markdown:
        typer.echo(switches.markdown(), nl=False)
        return
    rows = switches.rows()
    if common.json:
        print_json({"switches": rows})
        return
    made = Table()
    for name in ("switch", "value", "default", "allowed", "meaning"):
        made.add_column(name)
    for row in rows:
        changed = row["value"] != row["default"]
        value = "unset" if row["value"] is None else str(row["value"])
        default = "unset" if row["default"] is None else str(row["default"])
        made.add_row(
            row["name"],
            f"[bold]{value}[/bold]" if changed else value,
            default,
            row["allowed"],
            row["meaning"],
        )
    print_table(made)
