"""A socket, uvicorn on it, and its end: SIGTERM lets requests finish, a second signal ends them."""

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from exactmoe.errors import ConfigError
from exactmoe.serve.engine import Engine

_BACKLOG = 128
# Seconds beyond the grace that connections have to close, until uvicorn cuts them.
_CLOSING_SECONDS = 5
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def bind(host: str, port: int) -> socket.socket:
    """A socket of that address, not listening yet; port 0: any free one.

    Raises:
        ConfigError: the address cannot be had.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, proto)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
        except OSError:
            made.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"--host {host} --port {port} cannot be listened on: {error.strerror or error}; "
            "allowed: an address of this machine with a free port, --port 0 takes any"
        ) from error
    return made


def url_of(listening: socket.socket) -> str:
    """http://HOST:PORT of a bound socket."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """uvicorn with an end of our own: it would die of the signal that stops it."""

    def __init__(self, app: FastAPI, engine: Engine, grace: float) -> None:
        """grace: seconds that requests may still take after the first signal."""
        super().__init__(
            uvicorn.Config(
                app,
                access_log=False,
                log_config=None,
                lifespan="on",
                loop="asyncio",
                http="h11",
                ws="none",
                server_header=False,
                backlog=_BACKLOG,
                timeout_graceful_shutdown=int(grace) + _CLOSING_SECONDS,
            )
        )
        self.engine, self.grace = engine, grace
        self.signal: signal.Signals | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """None are uvicorn's; `run` listens to them."""
        yield

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """The first time: take no request, end those that are there when the grace is over. The
        second time: end them now.
        """
        if self.signal is not None:
            self.engine.end_all()
            return
        self.signal = number
        self.engine.stop_taking()
        asyncio.get_running_loop().call_later(self.grace, self.engine.end_all)
        self.should_exit = True


def run(server: Server, listening: socket.socket, on_start: Callable[[], None]) -> signal.Signals:
    """Serve until a signal says to stop, on the main thread; the signal.

    on_start: called once when requests are taken.
    """

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, server.stop, number)
        serving = asyncio.ensure_future(server.serve(sockets=[listening]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        if server.started:
            on_start()
        await serving

    asyncio.run(serve())
    if server.signal is None:
        raise RuntimeError("the server ended by itself; its log has more")
    return server.signal
