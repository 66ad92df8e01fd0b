"""The GLM demo model behind a server on a free port, in a thread of this process."""

import asyncio
import json
import os
import socket
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import httpx
import openai
import pytest

from exactmoe.serve.app import build_app
from exactmoe.serve.engine import Engine
from exactmoe.serve.limits import ServeLimits
from exactmoe.serve.metrics import Metrics
from exactmoe.serve.server import Server, bind, url_of
from exactmoe.serve.start import Wanted, load_service

DEMO = Path(__file__).resolve().parents[2] / "demo"
LIMITS = ServeLimits(queue=16, prompt_tokens=1000, total_tokens=1024, timeout=120)
WAIT = 60.0


class Running:
    """A server that runs, and clients of it."""

    def __init__(self, service, server, url, facts):
        self.service, self.server, self.url, self.facts = service, server, url, facts
        self.engine, self.model = service.engine, service.served.name
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0)
        self.http = httpx.Client(base_url=url, timeout=WAIT)

    def complete(self, prompt="def main(", max_tokens=6, **more):
        """One completion, greedy unless it says otherwise."""
        more = {"temperature": 0, **more}
        return self.openai.completions.create(
            model=self.model, prompt=prompt, max_tokens=max_tokens, **more
        )

    def text(self, **more):
        return self.complete(**more).choices[0].text

    def long_stream(self):
        """A request that would take minutes, after its first chunk."""
        stream = self.complete(max_tokens=900, stream=True)
        next(iter(stream))
        return stream

    @contextmanager
    def asked(self, **body):
        """A request on a connection of its own, whose answer nobody reads; the end closes it."""
        text = json.dumps({"model": self.model, **body})
        head = f"POST /v1/completions HTTP/1.1\r\nhost: here\r\ncontent-length: {len(text)}\r\n"
        head += "content-type: application/json\r\n\r\n"
        url = httpx.URL(self.url)
        with socket.create_connection((url.host, url.port)) as connection:
            connection.sendall((head + text).encode())
            yield

    def counted(self, name, **labels):
        """The value of a metric."""
        return self.service.metrics.registry.get_sample_value(name, labels) or 0.0

    def until(self, what):
        """Waits until it holds."""
        end = time.monotonic() + WAIT
        while not what():
            assert time.monotonic() < end, "it never came"
            time.sleep(0.01)

    def stop(self):
        """As the first signal does."""
        self.loop.call_soon_threadsafe(self.server.stop)


@pytest.fixture(scope="session")
def loaded():
    """The model's service; its engine is not started."""
    wanted = Wanted(
        name="glm5_next", limits=LIMITS, chunk=None, key=None, machine={"exactmoe": "test"}
    )
    settings = {"cards": ("cpu",), "numerics": None, "backend": "auto"}
    return load_service(DEMO / "glm5_next", settings, wanted)


@pytest.fixture(scope="session")
def served(loaded):
    """A context: a server with these limits, key or service fields on a port of its own."""

    @contextmanager
    def start(key=None, **limits):
        limits = replace(LIMITS, **limits)
        metrics = Metrics({"model": loaded.served.name})
        engine = Engine(loaded.served.model, loaded.engine.tokenizer, limits.queue, metrics)
        facts = []
        engine.told = facts.append
        service = replace(loaded, engine=engine, limits=limits, metrics=metrics, key=key)
        listening = bind("127.0.0.1", 0)
        server = Server(build_app(service), engine, limits.grace)
        running = Running(service, server, url_of(listening), facts)

        async def serve():
            running.loop = asyncio.get_running_loop()
            await running.server.serve(sockets=[listening])

        thread = threading.Thread(target=lambda: asyncio.run(serve()))
        thread.start()
        try:
            running.until(lambda: running.server.started)
            yield running
        finally:
            engine.end_all()
            running.server.should_exit = True
            thread.join(WAIT)
            assert not thread.is_alive()
            running.http.close()
            running.openai.close()

    return start


@pytest.fixture(scope="module")
def server(served):
    """A server with the usual limits."""
    with served() as running:
        yield running
