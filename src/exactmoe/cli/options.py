"""Options that commands share, and the parsing of lists."""

from typing import Annotated

import typer

from exactmoe.errors import ConfigError

Path = Annotated[str, typer.Argument(metavar="PATH", help="Checkpoint folder, or a hub id.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON only.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]
Cards = Annotated[str, typer.Option(metavar="NAMES", help="Devices, separated by commas.")]
NumericsClass = Annotated[
    str | None,
    typer.Option(metavar="a16|a8", help="Class of arithmetic; by default the model family's."),
]
Backend = Annotated[str, typer.Option(help="auto, cpu or reference. It changes speed only.")]


def names(text: str) -> tuple[str, ...]:
    """ "cuda:0,cuda:1" -> two names."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def integers(option: str, text: str) -> tuple[int, ...]:
    """ "1,2,65" -> three integers; ConfigError names the option."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{option} is {text!r}; allowed: integers separated by commas") from None
