"""Options that commands share, as structs, and the parsing of lists.

A command takes a struct as one argument; `flattened` shows its fields to typer as options.
"""

import inspect
import os
import pathlib
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, get_type_hints

import typer

from exactmoe import env
from exactmoe.config import PRESETS, Placement
from exactmoe.errors import ConfigError, Unsupported
from exactmoe.parallel.ranks import Ranks, launched
from exactmoe.plan import BACKENDS

PICTURES = (".png", ".svg", ".pdf")
# More tokens in a call than any model has positions for.
MOST_WIDTH = 1 << 20
# Seeds of torch's generators.
MOST_SEED = (1 << 63) - 1

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
        cards = tuple(part.strip() for part in self.cards.split(","))
        if not all(cards):
            raise ConfigError(
                f"--cards is {self.cards!r}; allowed: device names separated by commas, such as "
                "cuda:0,cuda:1"
            )
        checked_backend(self.backend)
        check_switches()
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


def check_switches() -> None:
    """ConfigError for an environment switch that is not allowed: before a model is loaded."""
    env.changed()


def checked_backend(name: str) -> None:
    """ConfigError when no backend has the name of --backend."""
    if name not in ("auto", *BACKENDS):
        raise ConfigError(f"--backend is {name!r}; allowed: auto, {', '.join(BACKENDS)}")


def integers(option: str, text: str, most: int | None = None) -> tuple[int, ...]:
    """ "1,2,65" -> three integers; ConfigError names the option.

    most: each has to be from 1 to this; None: any integer.
    """
    allowed = "integers" if most is None else f"integers from 1 to {most}"
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or (most is not None and not all(1 <= value <= most for value in found)):
        raise ConfigError(f"{option} is {text!r}; allowed: {allowed} separated by commas")
    return found


def require_writable(option: str, file: str | None, suffixes: tuple[str, ...] = ()) -> None:
    """Before the work, not after it: ConfigError unless a file can be written there; None: none is.

    suffixes: allowed ends of its name; none given: any.
    """
    if file is None:
        return
    path = pathlib.Path(file)
    if not file or not path.parent.is_dir():
        raise ConfigError(f"{option} is {file!r}; allowed: a file in a folder that is there")
    if path.is_dir():
        raise ConfigError(f"{option} is {file!r}, a folder; allowed: a file")
    if suffixes and path.suffix.lower() not in suffixes:
        raise ConfigError(f"{option} is {file!r}; allowed: a name with {', '.join(suffixes)}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{option} is {file!r}; allowed: a file that may be written")


def require_folder(option: str, folder: str) -> None:
    """Before the work: ConfigError unless `folder` is one that may be written, or can be made."""
    path = pathlib.Path(folder)
    there = next((one for one in (path, *path.parents) if one.exists()), path)
    if not folder or not there.is_dir() or not os.access(there, os.W_OK):
        raise ConfigError(f"{option} is {folder!r}; allowed: a folder that can be made or written")


def text_of(option: str, file: str) -> str:
    """The text of a file; ConfigError names the option."""
    try:
        return pathlib.Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option} {file} cannot be read: {error}") from error
