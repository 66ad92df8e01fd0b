"""The command line: `exactmoe COMMAND`. cli/app.py has the table of commands."""

from exactmoe.cli.app import main

__all__ = ["main"]
