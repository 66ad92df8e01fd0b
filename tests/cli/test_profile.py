"""`exactmoe profile` on the demo models: tables, JSON, the page with its pictures, the trace."""

import json
from pathlib import Path

import pytest

DEMO = Path(__file__).resolve().parents[2] / "demo" / "deepseek_v4"
STEPS = {"router", "sort", "gate_up", "down", "shared", "combine"}


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    """JSON, page and trace of the demo of DeepSeek."""
    from typer.testing import CliRunner

    from exactmoe.cli.app import build

    folder = tmp_path_factory.mktemp("profile")
    arguments = ["profile", str(DEMO), "--widths", "1,4", "--calls", "2", "--json"]
    arguments += ["--html", str(folder / "p.html"), "--trace", str(folder / "t.json")]
    result = CliRunner().invoke(build(), arguments)
    assert result.exit_code == 0, result.stderr
    return folder, json.loads(result.stdout)


def test_json_has_every_layer_and_width(profiled):
    folder, content = profiled
    found = {(row["width"], row["layer"]): row for row in content["eager"]}
    assert set(found) == {(width, layer) for width in (1, 4) for layer in range(5)}
    for row in found.values():
        assert row["calls"] == 2
        assert set(row["us"]) == STEPS | {"quantize"}
        assert all(us > 0 for us in row["us"].values())
        assert row["call_us"] > 0
    assert set(content["model_us"]) == {"1", "4"}
    for width in (1, 4):
        mlp = sum(row["call_us"] for key, row in found.items() if key[0] == width)
        assert mlp < content["model_us"][str(width)]
    assert content["machine"]["architecture"] == "cpu"
    files = [folder / name for name in ("t.json", "p.html", "p-steps.png", "p-layers.png")]
    assert content["files"] == [str(file) for file in files]
    assert all(file.is_file() for file in files)


def test_the_page_holds_its_pictures_and_needs_nothing_else(profiled):
    text = (profiled[0] / "p.html").read_text(encoding="utf-8")
    assert text.count('src="data:image/png;base64,') == 2
    for word in ("http://", "https://", "<script", "<link"):
        assert word not in text
    assert "1 token a call: MLP layers" in text
    assert "4 tokens a call, microseconds" in text
    assert "class a8: x, and later h, to FP8 codes with scales" in text


def test_the_trace(profiled):
    content = json.loads((profiled[0] / "t.json").read_text())["traceEvents"]
    steps = {e["name"] for e in content if e["ph"] == "X"}
    assert steps == STEPS | {"quantize"} | {f"layer {i}" for i in range(5)}
    assert {e["args"]["tokens"] for e in content if e["ph"] == "X"} == {1, 4}


def test_tables_and_a_text_of_ones_own(run, glm, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("def add(a, b):\n    return a + b\n", encoding="utf-8")
    result = run("profile", glm, "--text", text, "--widths", "2", "--calls", "1")
    assert result.exit_code == 0, result.stderr
    assert "2 tokens a call, eager" in result.stdout
    for name in (*STEPS, "dense", "finish", "rest", "whole call"):
        assert name in result.stdout
    assert "ms of the whole model" in result.stdout


def test_refusals(run, glm, tmp_path):
    for arguments, message in {
        ("--widths", "1,x"): "--widths is '1,x'; allowed: integers",
        ("--widths", "0"): "--widths is '0'; allowed: integers from 1",
        ("--widths", "5000"): "widths up to the length of the text",
        ("--text", str(tmp_path / "none")): "none cannot be read",
        ("--html", str(tmp_path / "no" / "p.html")): "allowed: a file in a folder that is there",
        ("--trace", str(tmp_path / "no" / "t.json")): "allowed: a file in a folder that is there",
    }.items():
        result = run("profile", glm, *arguments)
        assert result.exit_code == 2
        assert message in result.stderr
