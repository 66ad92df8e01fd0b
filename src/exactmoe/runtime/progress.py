"""A bar of bytes on stderr: how many, at what rate, and how long it still takes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


@contextmanager
def byte_bar(show: bool, nbytes: int, what: str = "reading") -> Iterator[Callable[[int], None]]:
    """Gives a function to call with the bytes of each step; it may be called from any thread.

    Nothing is shown unless `show` and stderr is a terminal; the bar goes when the block ends.
    """
    stderr = Console(stderr=True)
    columns = (
        TextColumn(what.replace("[", "\\[")),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TextColumn("remaining"),
        TimeRemainingColumn(),
    )
    shown = show and stderr.is_terminal
    with Progress(*columns, console=stderr, transient=True, disable=not shown) as bar:
        task = bar.add_task(what, total=nbytes)
        yield lambda done: bar.advance(task, done)
