"""The command line: `exactmoe COMMAND`. cli/app.py has the table of commands."""

import sys
from collections.abc import Sequence

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit; ctrl-C ends it with status 130, at the start as later."""
    try:
        # It brings in torch, which takes seconds: here, so that ctrl-C meanwhile is no traceback.
        from exactmoe.cli.app import main as run

        run(arguments)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


__all__ = ["INTERRUPTED", "main"]
