"""`exactmoe serve PATH`: one model over HTTP, as OpenAI's clients ask for it."""

import importlib.util
import logging
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from exactmoe import env
from exactmoe.cli import INTERRUPTED, options
from exactmoe.cli.output import open_checkpoint, print_json_line, status
from exactmoe.config import Placement
from exactmoe.errors import ConfigError, Unsupported
from exactmoe.parallel.placement import devices_of
from exactmoe.proof.machine import fingerprint as machine_facts
from exactmoe.proof.machine import package_version
from exactmoe.serve.limits import ServeLimits, token_limits

_PACKAGES = ("fastapi", "uvicorn", "prometheus_client")
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, kw_only=True)
class Serving:
    """Where the server listens, and what a request may ask for."""

    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0: all.")] = "127.0.0.1"
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one.")
    ] = 8000
    name: Annotated[
        str | None, typer.Option(help="Name of the model; by default the folder's, or the hub id.")
    ] = None
    queue: Annotated[int, typer.Option(min=0, help="Requests that may wait while one runs.")] = 16
    max_prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Of one request; by default as many as fit.")
    ] = None
    max_total_tokens: Annotated[
        int | None,
        typer.Option(min=2, help="Prompt and answer; by default the model's positions."),
    ] = None
    timeout: Annotated[
        float, typer.Option(help="Seconds a request may take, waiting included.")
    ] = 600.0
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Of a request's body.")] = 4 << 20
    grace: Annotated[
        float, typer.Option(help="Seconds that requests may still take after SIGTERM or ctrl-C.")
    ] = 10.0
    chunk: Annotated[
        int | None, typer.Option(min=1, help="Run prompts in chunks of this many tokens.")
    ] = None
    api_key: Annotated[
        str | None,
        typer.Option(
            help="Key that requests must bear. Other users of the machine can see it in the list "
            "of processes: EXACTMOE_API_KEY says it unseen."
        ),
    ] = None

    def limits(self, config: dict[str, Any]) -> ServeLimits:
        """The limits of requests to a model with this config.json."""
        text = config.get("text_config") or config
        prompt_tokens, total_tokens = token_limits(
            self.max_prompt_tokens, self.max_total_tokens, text.get("max_position_embeddings")
        )
        return ServeLimits(
            queue=self.queue,
            prompt_tokens=prompt_tokens,
            total_tokens=total_tokens,
            timeout=self.timeout,
            body_bytes=self.max_body_bytes,
            grace=self.grace,
        )

    def key(self) -> str | None:
        """The key that requests must bear; None: none."""
        if self.api_key is not None:
            if not self.api_key.strip():
                raise ConfigError("--api-key is empty; allowed: a text, or to leave it out")
            return self.api_key
        secret: env.Secret | None = env.read("EXACTMOE_API_KEY")
        return None if secret is None else secret.text


def command(path: options.Path, running: options.Running, serving: Serving) -> None:
    """Serve completions and chats over HTTP, one request at a time."""
    settings, key = running.settings(), serving.key()
    device = devices_of(Placement(cards=settings["cards"]))[0]
    _require_packages()
    # The web packages take a while to import.
    from exactmoe.serve.server import Server, bind, run, url_of

    # Before the model is loaded, which may take minutes: a port that is taken is said at once.
    with bind(serving.host, serving.port) as listening:
        checkpoint = open_checkpoint(path, running.numerics)
        limits = serving.limits(checkpoint.config)
        # transformers takes seconds to import: what is wrong above is said at once.
        from exactmoe.hf.text import quiet
        from exactmoe.serve.app import build_app
        from exactmoe.serve.start import Wanted, load_service

        if not running.debug:
            quiet()
        wanted = Wanted(
            name=serving.name or (Path(path).resolve().name if Path(path).exists() else path),
            limits=limits,
            chunk=serving.chunk,
            key=key,
            machine=_machine(device),
        )
        with status(not running.json) as say:
            say(f"loading {path}")
            service = load_service(checkpoint.path, settings, wanted)
        service.engine.told = print_json_line if running.json else _tell
        _log_to_stderr()
        server = Server(build_app(service), service.engine, limits.grace)
        ended = run(server, listening, lambda: _announce(service, url_of(listening), running.json))
    if ended == signal.SIGINT:
        raise typer.Exit(INTERRUPTED)


def _require_packages() -> None:
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise Unsupported(
            f"exactmoe serve needs {', '.join(missing)}, not installed: "
            "pip install 'exactmoe[serve]'"
        )


def _machine(device: torch.device) -> dict[str, Any]:
    return {**machine_facts(device), "transformers": package_version("transformers")}


def _announce(service: Any, url: str, as_json: bool) -> None:
    served, limits = service.served, service.limits
    host = url.partition("//")[2].rpartition(":")[0].strip("[]")
    open_to_all = host not in _LOOPBACK and service.key is None
    if as_json:
        print_json_line(
            {
                "url": f"{url}/v1",
                "model": served.name,
                "one_request_at_a_time": True,
                "queue_limit": limits.queue,
                "max_prompt_tokens": limits.prompt_tokens,
                "max_total_tokens": limits.total_tokens,
                "timeout": limits.timeout,
                "api_key": service.key is not None,
                "chat": served.has_chat,
                "system_fingerprint": served.fingerprint,
                **served.facts,
            }
        )
    else:
        facts = served.facts
        chat = "" if served.has_chat else " (no chat template: chat is refused)"
        typer.echo(
            f"{served.name} on {facts['cards']}, class {facts['numerics']}, backend "
            f"{facts['backend']}\n"
            f"  {url}/v1: completions, chat/completions{chat}, models; {url}/health, /metrics\n"
            f"  one request at a time; {limits.queue} may wait, further ones get status 429\n"
            f"  at most {limits.prompt_tokens} tokens of a prompt, {limits.total_tokens} with the "
            f"answer, {limits.timeout:g} seconds, {limits.body_bytes} bytes of body\n"
            f"  API key: {'none is asked for' if service.key is None else 'asked for'}"
        )
    sys.stdout.flush()
    if open_to_all:
        typer.echo(
            f"warning: {host} is not this machine alone and no API key is set: whoever reaches it "
            "may use it",
            err=True,
        )


def _tell(facts: dict[str, Any]) -> None:
    """One line a request on stderr, without a word of it."""
    typer.echo(
        f"{facts['request']}: {facts['outcome']}, {facts['prompt_tokens']} + "
        f"{facts['new_tokens']} tokens, waited {facts['wait_seconds']:.2f} s of "
        f"{facts['seconds']:.2f} s",
        err=True,
    )


def _log_to_stderr() -> None:
    """Failures inside the server, with their tracebacks."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
