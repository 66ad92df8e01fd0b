"""Wrong use ends at once with one line that names the value and what is allowed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from exactmoe.cli import app, verify

GLM = str(Path(__file__).resolve().parents[2] / "demo" / "glm5_next")
DEEPSEEK = str(Path(GLM).parent / "deepseek_v4")
TEXT = ["routes", GLM, "--text", __file__]

WRONG = [
    (["plan", GLM, "--cards", "1GiB", "--rows", "x"], "--rows is 'x'; allowed: a valid integer"),
    (["plan", GLM, "--cards", "1GiB", "--rows", "0"], "--rows is 0; allowed: from 1"),
    (["plan", GLM, "--cards", "1GiB,,1GiB"], "--cards is '1GiB,,1GiB'; allowed: bytes such as"),
    (
        ["plan", GLM, "--cards", "1GiB", "--read-rate", "-1TB/s"],
        "--read-rate is '-1TB/s'; allowed: rates such as",
    ),
    (
        ["plan", GLM, "--cards", "1GiB", "--read-rate", "1TB/s,1TB/s"],
        "--read-rate is '1TB/s,1TB/s' for 1 cards; allowed: one rate, or one a card",
    ),
    (["plan", GLM, "--cards", "1GiB", "--html", ""], "--html is ''; allowed: a file"),
    (["plan"], "missing argument 'PATH' (exactmoe plan --help)"),
    (["plan", GLM, "--cardz", "1"], "no such option: --cardz"),
    (["pln"], "no such command 'pln'"),
    (["inspect", ""], "PATH is ''; allowed: a checkpoint folder, or a hub id"),
    (["generate", GLM], "missing option '--prompt' (exactmoe generate --help)"),
    (["generate", GLM, "--prompt", "x", "--max-new-tokens", "0"], "--max-new-tokens is '0'"),
    (["generate", GLM, "--prompt", "x", "--backend", "x"], "--backend is 'x'; allowed: auto, "),
    (["generate", GLM, "--prompt", "x", "--cards", "cpu,,cpu"], "--cards is 'cpu,,cpu'; allowed"),
    (["verify", GLM, "--widths", "0"], "--widths is '0'; allowed: integers from 1 to 1048576"),
    (["verify", GLM, "--widths", "9" * 12], f"--widths is '{'9' * 12}'; allowed: integers"),
    (["verify", GLM, "--html", ""], "--html is ''; allowed: a file"),
    (["profile", GLM, "--widths", "0"], "--widths is '0'; allowed: integers from 1"),
    (["bench", "--seed", str(1 << 70)], f"--seed is '{1 << 70}'; allowed: less than"),
    (["bench", "--tiles", "0"], "--tiles is '0'; allowed: integers from 1"),
    (["bench", "--shape", ""], "--shape is ''; allowed: glm"),
    (["bench", "--format", ""], "--format is ''; allowed: nvfp4, mxfp4"),
    (["bench", "--peers", ""], "peer is ''; allowed: all, none"),
    (["bench", "--backend", "x"], "--backend is 'x'; allowed: auto"),
    (["bench", "--plot", "x.xyz"], "--plot is 'x.xyz'; allowed: a name with .png"),
    (["quantize", DEEPSEEK, "", "--format", "nvfp4"], "OUT is ''; allowed: a folder"),
    (["quantize", DEEPSEEK, "out", "--format", "fp8"], "--format is 'fp8'; allowed: nvfp4, mxfp4"),
    (["convert", GLM, "", "--dialect", "modelopt"], "OUT is ''; allowed: a folder"),
    ([*TEXT, "--over", "21"], "21 cards for 20 experts; allowed: at most as many"),
    ([*TEXT, "--save-as", "csv"], "--save-as is 'csv'; allowed: npz, parquet"),
    ([*TEXT, "--out", __file__], "allowed: a folder that can be made or written"),
    (["env", "--json", "--markdown"], "--markdown and --json were both given; allowed: one"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_one_line_names_the_value_and_what_is_allowed(
    run, tmp_path, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("exactmoe: ") and result.stderr.count("\n") == 1
    assert message in result.stderr
    assert result.stdout == ""
    assert list(tmp_path.iterdir()) == []


FILES = [
    ["verify", GLM, "--html"],
    ["profile", GLM, "--html"],
    ["profile", GLM, "--trace"],
    ["plan", GLM, "--cards", "1GiB", "--html"],
    ["bench", "--csv"],
    ["bench", "--plot"],
    ["quantize", DEEPSEEK, "out", "--format", "nvfp4", "--plot"],
]


@pytest.mark.parametrize("arguments", FILES)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    run, tmp_path, monkeypatch, arguments
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.png").mkdir()
    for name, message in (
        ("folder.png", "is 'folder.png', a folder; allowed: a file"),
        ("nowhere/x.png", "is 'nowhere/x.png'; allowed: a file in a folder that is there"),
    ):
        result = run(*arguments, name)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr == f"exactmoe: {arguments[-1]} {message}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["folder.png"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", GLM, "--prompt", "x"],
        ["verify", GLM],
        ["profile", GLM],
        TEXT,
        ["serve", GLM, "--port", "0"],
        ["bench"],
    ],
)
def test_a_switch_that_is_not_allowed_is_refused_before_the_work(run, monkeypatch, arguments):
    monkeypatch.setitem(sys.modules, "exactmoe.hf", None)  # importing it raises ImportError
    monkeypatch.setenv("EXACTMOE_THREADS", "0")
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "exactmoe: EXACTMOE_THREADS='0'; allowed: a positive integer\n"


def test_a_prompt_that_is_too_long_is_refused_before_the_model_is_loaded(run, monkeypatch):
    def loaded(*args, **settings):
        raise AssertionError("the model is loaded")

    monkeypatch.setattr("exactmoe.hf.load_model", loaded)
    for arguments in (
        ["generate", GLM, "--prompt", "x", "--max-new-tokens", "1024"],
        ["verify", GLM, "--prompt", "x " * 2000],
    ):
        result = run(*arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        assert "the model has 1024 positions" in result.stderr


def test_a_text_that_is_too_short_leaves_nothing(run, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("hello")
    result = run("routes", GLM, "--text", short, "--out", tmp_path / "routes")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "tokens in a layer; allowed: from 32\n" in result.stderr
    assert not (tmp_path / "routes").exists()


def test_a_missing_tokenizer_is_one_line(run, tmp_path):
    for file in Path(GLM).iterdir():
        if "token" not in file.name:
            (tmp_path / file.name).symlink_to(file)
    result = run("generate", tmp_path, "--prompt", "x")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"exactmoe: {tmp_path}: no tokenizer can be loaded: ")
    assert result.stderr.count("\n") == 1


def test_a_layer_that_is_named_twice_is_proved_once():
    layer = object()
    assert verify.chosen([(0, None, layer)], (0, 0), every=False) == [(0, layer)]


def test_the_list_of_commands_cuts_no_sentence(run):
    listed = run("--help").stdout.partition("Commands:")[2]
    assert "..." not in listed


def started(*arguments, stdout=subprocess.PIPE):
    """`python -m exactmoe` as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "exactmoe", *arguments],
        env={**os.environ, "PYTHONPATH": str(Path(app.__file__).parents[2])},
        text=True,
        stdout=stdout,
        stderr=subprocess.PIPE,
    )


@pytest.mark.parametrize("as_json", [False, True])
def test_a_reader_that_goes_is_no_error(as_json):
    read, write = os.pipe()
    running = started("plan", GLM, "--cards", "9GiB", *["--json"] * as_json, stdout=write)
    os.close(write)
    os.close(read)
    assert running.communicate(timeout=120) == (None, "")
    assert running.returncode == 141


def test_the_package_can_be_run():
    running = started("--version")
    shown, told = running.communicate(timeout=120)
    assert (running.returncode, told) == (0, "")
    assert shown.startswith("exactmoe ")


@pytest.mark.parametrize("columns", [40, 80])
def test_a_narrow_terminal_loses_no_digit(run, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    shown = re.sub(r"\x1b\[[0-9;]*m", "", run("inspect", GLM).stdout)
    assert "…" not in shown
    assert {len(line) for line in shown.splitlines() if line[:1] in "┏┃┡│└"} == {80}
