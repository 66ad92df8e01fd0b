"""The table of commands, and what they share: --version, --debug, errors in one line, exit status.

Exit status: 0; 1 when bits differ; 2 for a value, a file or a request that is not allowed; 130 at
ctrl-C.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

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
        except (typer.Exit, typer.Abort):
            raise
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except Exception as error:
            if debug:
                raise
            typer.echo(f"exactmoe: {_message(error)}", err=True)
            status = MISMATCH if isinstance(error, BitMismatch) else BAD_INPUT
            raise typer.Exit(status) from None

    return run


def _message(error: Exception) -> str:
    if isinstance(error, ExactMoEError):
        return str(error)
    text = str(error).strip()
    return f"{type(error).__name__}: {text} (--debug shows where)"


def build() -> typer.Typer:
    """The application, with every command of the table."""
    app = typer.Typer(
        name="exactmoe",
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
