"""What all commands share: help, version, errors in one line, exit status, tracebacks."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

import exactmoe.cli
from exactmoe.cli import app
from exactmoe.errors import BitMismatch, CheckpointError, Unsupported

COMMANDS = (
    "bench",
    "convert",
    "env",
    "generate",
    "inspect",
    "plan",
    "profile",
    "quantize",
    "routes",
    "serve",
    "verify",
)
SOURCE = Path(app.__file__).parents[2]
GLM = str(Path(__file__).resolve().parents[2] / "demo" / "glm5_next")


def start(*arguments):
    """A process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "exactmoe.cli", *arguments]
    return subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def test_help_names_every_command(run):
    result = run("--help")
    assert result.exit_code == 0
    assert tuple(app.COMMANDS) == COMMANDS
    for name in COMMANDS:
        assert f"\n  {name} " in result.stdout
        shown = run(name, "--help").stdout
        assert "--json" in shown and "--debug" in shown


def test_version(run):
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith("exactmoe ")


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (CheckpointError("a.safetensors: w is missing"), 2, "a.safetensors: w is missing"),
        (Unsupported("no kernels"), 2, "no kernels"),
        (BitMismatch("y is wrong"), 1, "y is wrong"),
        (OSError("disk"), 2, "OSError: disk (--debug shows where)"),
        (KeyError("k"), 2, "KeyError: 'k' (--debug shows where)"),
    ],
)
def test_errors(capsys, error, status, message):
    def command(debug=False):
        raise error

    with pytest.raises(typer.Exit) as stopped:
        app._guarded(command)(debug=False)
    assert stopped.value.exit_code == status
    shown = capsys.readouterr()
    assert shown.err == f"exactmoe: {message}\n"
    assert shown.out == ""
    with pytest.raises(type(error)):
        app._guarded(command)(debug=True)


def test_ctrl_c():
    def command(debug=False):
        raise KeyboardInterrupt

    with pytest.raises(typer.Exit) as stopped:
        app._guarded(command)(debug=False)
    assert stopped.value.exit_code == 130


BAD = [
    (["inspect", "nowhere"], "nowhere is not a folder; allowed: a folder, or a hub id"),
    (["generate", "nowhere", "--prompt", "x"], "nowhere is not a folder"),
    (["verify", "nowhere"], "nowhere is not a folder"),
    (["serve", "nowhere", "--port", "0"], "nowhere is not a folder"),
    (["inspect", __file__], "is a file; allowed: a checkpoint folder"),
    (["inspect", str(Path(__file__).parent)], "config.json"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_path(run, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("command", ["generate", "verify"])
@pytest.mark.parametrize(
    ("path", "extra", "message"),
    [
        (__file__, [], "is a file; allowed: a checkpoint folder"),
        (str(Path(__file__).parent), [], "config.json is missing"),
        (GLM, ["--numerics", "a17"], "--numerics is 'a17'; allowed: a16, a8\n"),
        (GLM, ["--cards", "gpu"], "card is 'gpu'; allowed: a device name"),
        (GLM, ["--cards", "mps"], "card is 'mps'; this version runs on: cpu, cuda\n"),
    ],
)
def test_bad_input_is_seen_before_transformers_is_imported(
    run, monkeypatch, command, path, extra, message
):
    monkeypatch.setitem(sys.modules, "exactmoe.hf", None)  # importing it raises ImportError
    prompt = ["--prompt", "x"]
    result = run(command, path, *prompt, *extra)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.startswith("exactmoe: ") and result.stderr.count("\n") == 1


def test_numerics_of_inspect(run):
    result = run("inspect", GLM, "--numerics", "a17")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "exactmoe: --numerics is 'a17'; allowed: a16, a8\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "here"],
        ["generate", "here", "--prompt", "x", "--max-new-tokens", "-3"],
        ["generate", "here", "--prompt", "x", "--max-new-tokens", "0"],
        ["generate", "here", "--prompt", "x", "--chunk", "0"],
        ["verify", "here", "--seed", "-1"],
        ["explain"],
    ],
)
def test_bad_usage(run, arguments):
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("exactmoe: ") and result.stderr.count("\n") == 1
    assert result.stderr.endswith("--help)\n")


def test_process_without_traceback_and_with_debug():
    broken = start("inspect", str(Path(__file__).parent))
    out, err = broken.communicate(timeout=120)
    assert (broken.returncode, out) == (2, "")
    assert err.startswith("exactmoe: ") and err.count("\n") == 1
    shown = start("inspect", str(Path(__file__).parent), "--debug")
    _, err = shown.communicate(timeout=120)
    assert shown.returncode != 0
    assert "Traceback" in err and "CheckpointError" in err


def test_process_ends_cleanly_at_ctrl_c(glm):
    """The text so far is printed, and the exit status is 130."""
    running = start("generate", glm, "--prompt", "def main(", "--max-new-tokens", "900")
    text = ""
    while len(text) < len("def main(") + 3:
        text += running.stdout.read(1)
        assert running.poll() is None
    time.sleep(0.2)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=120)
    assert running.returncode == 130, err
    assert (text + out).startswith("def main(") and (text + out).endswith("\n")
    assert "interrupted" in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        (["inspect", GLM], "model_type", "glm5_next"),
        (["generate", GLM, "--prompt", "x", "--max-new-tokens", "2"], "new_tokens", 2),
        (["verify", GLM, "--prompt", "x y", "--layers", "1", "--widths", "1,2"], "ok", True),
    ],
)
def test_process_prints_json_only(arguments, name, value):
    """No progress bar and no other word, on stdout or on stderr."""
    made = start(*arguments, "--json")
    out, err = made.communicate(timeout=120)
    assert made.returncode == 0
    assert json.loads(out)[name] == value
    assert err == ""


def test_ctrl_c_while_the_commands_are_imported(monkeypatch, capsys):
    class Interrupted:
        def find_spec(self, name, path, target=None):
            if name == "exactmoe.cli.app":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "exactmoe.cli.app")
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    with pytest.raises(SystemExit) as stopped:
        exactmoe.cli.main(["--version"])
    assert stopped.value.code == 130
    assert capsys.readouterr() == ("", "")


def test_nothing_slow_is_imported_outside_of_that_guard():
    code = "import sys, exactmoe.cli; print({'torch', 'numba', 'typer', 'rich'} & set(sys.modules))"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    shown = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert shown.stdout == b"set()\n", shown
