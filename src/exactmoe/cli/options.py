"""Options that commands share, as structs, and the parsing of lists.

A command takes a struct as one argument; `flattened` shows its fields to typer as options.
"""

import inspect
import pathlib
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, get_type_hints

import typer

from exactmoe.config import PRESETS, Placement
from exactmoe.errors import ConfigError, Unsupported
from exactmoe.parallel.ranks import Ranks, launched

Path = Annotated[str, typer.Argument(metavar="PATH", help="Checkpoint folder, or a hub id.")]
NumericsClass = Annotated[
    str | None,
    typer.Option(metavar="a16|a8", help="Class of arithmetic; by default the model family's."),
]


@dataclass(frozen=True, kw_only=True)
class Common:
    """Options of every command."""

    json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False


@dataclass(frozen=True, kw_only=True)
class Running(Common):
    """Options of a command that runs a model."""

    cards: Annotated[str, typer.Option(metavar="NAMES", help="Devices, comma-separated.")] = "cpu"
    numerics: NumericsClass = None
    backend: Annotated[
        str, typer.Option(help="auto, cuda, triton, cpu or reference. It changes speed only.")
    ] = "auto"

    def settings(self, over_ranks: bool = False) -> dict[str, Any]:
        """Arguments of load_model; ConfigError and Unsupported for one that is not allowed.

        over_ranks: where torchrun started this process, the model goes over its ranks; a command
            that does not know them refuses to run there.
        """
        cards = tuple(part.strip() for part in self.cards.split(",") if part.strip())
        found = {
            "cards": Placement(cards=cards).cards,
            "numerics": checked_numerics(self.numerics),
            "backend": self.backend,
        }
        if not launched():
            return found
        if not over_ranks:
            raise Unsupported("torchrun started this process; allowed over ranks: generate, verify")
        return {**found, "ranks": Ranks.auto(cards[0])}


def flattened(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the fields of its structs as arguments of its own, for typer to read."""
    hints = get_type_hints(command, include_extras=True)
    structs: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    keyword = inspect.Parameter.KEYWORD_ONLY
    shown = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name in structs:
            types = get_type_hints(structs[parameter.name], include_extras=True)
            shown += [
                inspect.Parameter(f.name, keyword, default=f.default, annotation=types[f.name])
                for f in fields(structs[parameter.name])
            ]
        else:
            annotation = hints[parameter.name]
            shown.append(parameter.replace(kind=keyword, annotation=annotation))

    def run(**given: Any) -> None:
        for name, struct in structs.items():
            given[name] = struct(**{f.name: given.pop(f.name) for f in fields(struct)})
        command(**given)

    run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


def checked_numerics(name: str | None) -> str | None:
    """The value of --numerics as it is; ConfigError when no class has that name."""
    if name is not None and name not in PRESETS:
        raise ConfigError(f"--numerics is {name!r}; allowed: {', '.join(PRESETS)}")
    return name


def integers(option: str, text: str) -> tuple[int, ...]:
    """ "1,2,65" -> three integers; ConfigError names the option."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{option} is {text!r}; allowed: integers separated by commas") from None


def text_of(option: str, file: str) -> str:
    """The text of a file; ConfigError names the option."""
    try:
        return pathlib.Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option} {file} cannot be read: {error}") from error
