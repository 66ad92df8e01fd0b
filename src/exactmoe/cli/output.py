"""What commands print: results on stdout, progress on stderr."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from exactmoe.checkpoint import Checkpoint
from exactmoe.errors import CheckpointError
from exactmoe.runtime.progress import byte_bar

# Of tables: where stdout is no terminal, and on the narrowest one.
_WIDTH, _LEAST_WIDTH = 160, 80


def folder_of(path: str) -> Path:
    """The folder of a PATH argument; a hub id is fetched."""
    if not path.strip():
        raise CheckpointError(f"PATH is {path!r}; allowed: a checkpoint folder, or a hub id")
    if Path(path).is_dir():
        return Path(path)
    if Path(path).exists():
        raise CheckpointError(f"{path} is a file; allowed: a checkpoint folder, or a hub id")
    # Only a hub id needs this import, which brings in transformers.
    from exactmoe.hf.hub import checkpoint_folder

    return checkpoint_folder(path)


def open_checkpoint(path: str, numerics: str | None = None) -> Checkpoint:
    """The checkpoint of a PATH argument."""
    return Checkpoint(folder_of(path), numerics)


def print_json(content: dict[str, Any]) -> None:
    """One JSON object on stdout; NaN and Inf are no JSON and raise."""
    typer.echo(json.dumps(content, indent=2, allow_nan=False))


def print_json_line(content: dict[str, Any]) -> None:
    """One JSON object as one line on stdout, at once: of a command that goes on."""
    typer.echo(json.dumps(content, allow_nan=False))
    sys.stdout.flush()


def print_table(table: Table) -> None:
    """A table on stdout, as wide as it needs where that is no terminal; a narrow terminal folds
    what is too long, so that no digit is left out.
    """
    for column in table.columns:
        column.overflow = "fold"
    made = Console(highlight=False)
    width = max(made.width, _LEAST_WIDTH) if made.is_terminal else _WIDTH
    Console(highlight=False, width=width).print(table)


@contextmanager
def status(show: bool) -> Iterator[Callable[[str], None]]:
    """A line on stderr that says what runs; nothing unless stderr is a terminal and `show`."""
    stderr = Console(stderr=True, quiet=not show, highlight=False)
    with stderr.status("starting") as line:
        yield lambda text: line.update(text.replace("[", "\\["))


def reading(show: bool, nbytes: int) -> AbstractContextManager[Callable[[int], None]]:
    """A bar of bytes read on stderr, with rate and remaining time."""
    return byte_bar(show, nbytes, "reading")
