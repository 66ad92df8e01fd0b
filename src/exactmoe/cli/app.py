"""The table of commands, and what they share: --version, --debug, errors in one line, exit status.

Exit status: 0; 1 when bits differ; 2 for a value, a file or a request that is not allowed; 130 at
ctrl-C; 141 when nobody reads stdout any more.
"""

import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
import typer.core

from exactmoe.cli import (
    INTERRUPTED,
    bench,
    convert,
    env,
    generate,
    inspect,
    options,
    plan,
    profile,
    quantize,
    routes,
    serve,
    verify,
)
from exactmoe.errors import BitMismatch, ExactMoEError
from exactmoe.proof.machine import package_version

# A new command is a module with a function `command` and a line here.
COMMANDS: dict[str, Callable[..., None]] = {
    "bench": bench.command,
    "convert": convert.command,
    "env": env.command,
    "generate": generate.command,
    "inspect": inspect.command,
    "plan": plan.command,
    "profile": profile.command,
    "quantize": quantize.command,
    "routes": routes.command,
    "serve": serve.command,
    "verify": verify.command,
}
MISMATCH, BAD_INPUT = 1, 2
# As of a program that SIGPIPE ends.
READER_GONE = 141
# UsageError, for which typer has no public name.
_USAGE_ERROR: type[Exception] = typer.BadParameter.__bases__[0]


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"exactmoe {package_version()}")
        raise typer.Exit()


def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """MLP layers of FP4 mixture-of-experts models: one bit pattern per token at every width."""


def _guarded(command: Callable[..., None]) -> Callable[..., None]:
    """The command with its errors as one message and an exit status; --debug raises them."""

    @functools.wraps(command)
    def run(*args: Any, debug: bool, **kwargs: Any) -> None:
        try:
            command(*args, debug=debug, **kwargs)
            # Here, where a full disk or a reader that has gone is an error with a status.
            if sys.stdout is not None:
                sys.stdout.flush()
        except (typer.Exit, typer.Abort):
            raise
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            # `exactmoe ... | head -1` is no error; what is left goes nowhere, or the interpreter
            # would complain at its end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(READER_GONE) from None
        except Exception as error:
            if debug:
                raise
            typer.echo(f"exactmoe: {_message(error)}", err=True)
            status = MISMATCH if isinstance(error, BitMismatch) else BAD_INPUT
            raise typer.Exit(status) from None

    return run


class _Commands(typer.core.TyperGroup):
    """Commands whose wrong use is told in one line, as all other errors are."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """As typer's; exits with BAD_INPUT where options or arguments are wrong."""
        asked = extra.get("args")
        if not (sys.argv[1:] if asked is None else asked):
            return super().main(*args, **extra)
        try:
            status = super().main(*args, **{**extra, "standalone_mode": False})
        except _USAGE_ERROR as error:
            typer.echo(f"exactmoe: {_wrong_use(error)}", err=True)
            status = BAD_INPUT
        sys.exit(status or 0)


def _wrong_use(error: Any) -> str:
    """The parameter, what it was and what is allowed, and where help is; error: a UsageError."""
    command = error.ctx.command_path if error.ctx is not None else "exactmoe"
    told = " ".join(error.format_message().split()).rstrip(".")
    checked = getattr(error.__cause__, "errors", None)
    if checked is not None and getattr(error, "param", None) is not None:
        first = checked()[0]
        allowed = first["msg"].removeprefix("Input should be ").partition(", unable")[0]
        told = f"{max(error.param.opts, key=len)} is {str(first['input'])!r}; allowed: {allowed}"
    return f"{told[:1].lower()}{told[1:]} ({command} --help)"


def _message(error: Exception) -> str:
    if isinstance(error, ExactMoEError):
        return str(error)
    text = str(error).strip()
    return f"{type(error).__name__}: {text} (--debug shows where)"


def build() -> typer.Typer:
    """The application, with every command of the table."""
    app = typer.Typer(
        name="exactmoe",
        cls=_Commands,
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_root)
    for name, command in COMMANDS.items():
        app.command(name)(_guarded(options.flattened(command)))
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    build()(args=None if arguments is None else list(arguments), prog_name="exactmoe")
