"""`exactmoe serve`: what it says at the start, its ends by signals, what it refuses to start."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import openai
import pytest

from exactmoe.cli import serve
from exactmoe.errors import ConfigError
from exactmoe.serve.server import bind, url_of

SOURCE = Path(serve.__file__).parents[2]
DEEPSEEK = str(Path(__file__).resolve().parents[2] / "demo" / "deepseek_v4")


@contextlib.contextmanager
def process(*arguments, **environment):
    """(process, its first line) of a server on a free port."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "HF_HUB_OFFLINE": "1", **environment}
    command = [sys.executable, "-m", "exactmoe.cli", "serve", DEEPSEEK, "--port", "0", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = subprocess.Popen(command, env=environment, **pipes)
    try:
        yield started, started.stdout.readline()
    finally:
        started.kill()
        started.communicate()


def test_sigterm_ends_with_status_0(run):
    with process("--json", "--grace", "0.2", EXACTMOE_API_KEY="sk-1") as (started, line):
        told = json.loads(line)
        assert told["one_request_at_a_time"] is True
        assert (told["model"], told["queue_limit"]) == ("deepseek_v4", 16)
        assert (told["max_prompt_tokens"], told["max_total_tokens"]) == (1023, 1024)
        assert (told["api_key"], told["chat"], told["numerics"]) == (True, True, "a8")
        client = openai.OpenAI(base_url=told["url"], api_key="sk-1", max_retries=0)
        ask = {"model": "deepseek_v4", "prompt": "def main(", "temperature": 0}
        answer = client.completions.create(**ask, max_tokens=3)
        assert answer.system_fingerprint == told["system_fingerprint"]
        stream = client.completions.create(**ask, max_tokens=900, stream=True)
        first = next(iter(stream)).choices[0].text
        assert answer.choices[0].text.startswith(first)
        started.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="the server is stopping"):
            list(stream)
        out, err = started.communicate(timeout=60)
        assert started.returncode == 0, err
        lines = [json.loads(text) for text in out.splitlines()]
        assert [facts["outcome"] for facts in lines] == ["length", "shutdown"]
        assert "sk-1" not in err and "Traceback" not in err
    text = run("generate", DEEPSEEK, "--prompt", "def main(", "--max-new-tokens", 3, "--json")
    assert json.loads(text.stdout)["text"] == answer.choices[0].text


def test_ctrl_c_ends_with_status_130(run, glm, monkeypatch):
    """Everything but the loop itself; the text that is shown at the start."""
    shown = []

    def ended_by(server, listening, on_start):
        on_start()
        shown.append(server.grace)
        return signal.SIGINT

    monkeypatch.setattr("exactmoe.serve.server.run", ended_by)
    result = run("serve", glm, "--port", 0, "--host", "0.0.0.0", "--grace", 3, "--queue", 2)
    assert result.exit_code == 130
    assert shown == [3.0]
    assert result.stdout.startswith("glm5_next on cpu, class a16, backend cpu\n")
    for part in (
        "one request at a time; 2 may wait, further ones get status 429",
        "at most 1023 tokens of a prompt, 1024 with the answer, 600 seconds",
        "API key: none is asked for",
    ):
        assert part in result.stdout
    assert "0.0.0.0 is not this machine alone and no API key is set" in result.stderr


def test_a_second_signal_ends_at_once():
    class Engine:
        calls = []

        def stop_taking(self):
            self.calls.append("stop_taking")

        def end_all(self):
            self.calls.append("end_all")

    import asyncio

    from fastapi import FastAPI

    from exactmoe.serve.server import Server

    async def twice():
        server = Server(FastAPI(), Engine(), grace=1000)
        server.stop(signal.SIGTERM)
        assert (Engine.calls, server.should_exit) == (["stop_taking"], True)
        server.stop(signal.SIGINT)
        assert Engine.calls == ["stop_taking", "end_all"]
        assert server.signal == signal.SIGTERM

    asyncio.run(twice())


def test_a_port_that_is_taken_is_said_before_anything_is_loaded(run):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = run("serve", "nowhere", "--port", port)
        assert result.exit_code == 2
        assert f"--host 127.0.0.1 --port {port} cannot be listened on" in result.stderr
        assert "in use" in result.stderr


def test_addresses():
    with bind("127.0.0.1", 0) as listening:
        assert url_of(listening).startswith("http://127.0.0.1:")
        with pytest.raises(httpx.ConnectError):
            httpx.get(url_of(listening))
    with pytest.raises(ConfigError, match="--host no.such.host.invalid --port 1 cannot"):
        bind("no.such.host.invalid", 1)


REFUSED = [
    (["--max-total-tokens", "2000"], "--max-total-tokens is 2000; allowed: at most the model's"),
    (["--max-prompt-tokens", "1024"], "total_tokens is 1024, prompt_tokens 1024; allowed: more"),
    (["--timeout", "0"], "timeout is 0.0; allowed: above 0 seconds"),
    (["--grace", "-1"], "grace is -1.0; allowed: from 0 seconds"),
    (["--api-key", " "], "--api-key is empty"),
    (["--numerics", "a4"], "--numerics is 'a4'; allowed: a16, a8"),
    (["--cards", "gpu"], "card is 'gpu'; allowed: a device name"),
    (["--cards", "cpu:0,cuda:9"], "card is 'c"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_refused_before_the_model_is_loaded(run, glm, monkeypatch, arguments, message):
    monkeypatch.setattr("exactmoe.serve.start.load_service", None)
    result = run("serve", glm, "--port", 0, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_missing_packages(run, glm, monkeypatch):
    real = serve.importlib.util.find_spec
    monkeypatch.setattr(
        serve.importlib.util, "find_spec", lambda name: None if name == "uvicorn" else real(name)
    )
    result = run("serve", glm)
    assert result.exit_code == 2
    assert "needs uvicorn, not installed: pip install 'exactmoe[serve]'" in result.stderr


def test_the_key_of_the_switch_and_of_the_option(monkeypatch):
    monkeypatch.delenv("EXACTMOE_API_KEY", raising=False)
    assert serve.Serving().key() is None
    monkeypatch.setenv("EXACTMOE_API_KEY", "sk-1")
    assert serve.Serving().key() == "sk-1"
    assert serve.Serving(api_key="sk-2").key() == "sk-2"
