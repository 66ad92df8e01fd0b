"""`exactmoe verify --against FILE` and `--html FILE`: a report of another machine, and the page."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from exactmoe.cli import verify as command
from exactmoe.cli.app import build

GLM = str(Path(__file__).resolve().parents[2] / "demo" / "glm5_next")
QUICK = ("verify", GLM, "--widths", "1,9", "--prompt", "def main(argv):\n    return a\n")


@pytest.fixture(scope="module", autouse=True)
def short_texts():
    """What is told beside the proof took half of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "TEXT_PROMPT", 9)
        patch.setattr(command, "TEXT_NEW", 3)
        yield


@pytest.fixture(scope="module")
def first():
    """What one machine says of layer 1."""
    result = CliRunner().invoke(build(), [*QUICK, "--layers", "1", "--json"])
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture
def theirs(first, tmp_path):
    """A file of it, changed."""

    def write(change=lambda content: None):
        content = json.loads(json.dumps(first))
        change(content)
        path = tmp_path / "theirs.json"
        path.write_text(json.dumps(content), encoding="utf-8")
        return str(path)

    return write


def test_the_same_machine_agrees_and_the_page_says_so(theirs, first, run, tmp_path):
    assert list(first["vectors"]) == [
        f"layer 1: score, a16, nvfp4, {e}" for e in ("block", "experts")
    ]
    assert first["reports"][1]["times"]["width"] > 0
    page = tmp_path / "proof.html"
    result = run(*QUICK, "--layers", "1", "--against", theirs(), "--html", page, "--json")
    assert result.exit_code == 0, result.stderr
    content = json.loads(result.stdout)
    assert content["vectors"] == first["vectors"]
    assert content["against"]["ok"] is True
    assert content["against"]["bytes"] == 2 * 16 * 256 * 2
    text = page.read_text(encoding="utf-8")
    assert "<h2>Beside the other machine</h2>" in text
    assert "Proved: " in text and "Agree: 16,384 bytes compared" in text
    assert '<td class="bad">' not in text


def test_a_difference_ends_with_status_1_and_is_named(theirs, run, tmp_path):
    def plant(content):
        rows = content["vectors"]["layer 1: score, a16, nvfp4, block"]["rows"]
        rows[2] = "0" * 64

    page = tmp_path / "proof.html"
    result = run(*QUICK, "--layers", "1", "--against", theirs(plant), "--html", page)
    assert result.exit_code == 1
    named = "layer 1: score, a16, nvfp4, block: DIFFERS (1 of 16 rows, first 2)"
    assert named in result.stderr
    assert "all bytes equal" in result.stdout  # of this machine itself
    assert f"DOES NOT AGREE with {tmp_path / 'theirs.json'} (cpu)" in result.stdout
    text = page.read_text(encoding="utf-8")
    assert "FAILED: " in text and '<td class="bad">DIFFERS</td>' in text


def test_files_are_looked_at_before_anything_is_loaded(run, tmp_path):
    for arguments, message in {
        ("--against", str(tmp_path / "none.json")): "is no report of `exactmoe verify --json`",
        ("--html", str(tmp_path / "none" / "x.html")): "a file in a folder that is there",
    }.items():
        result = run("verify", GLM, *arguments)
        assert result.exit_code == 2
        assert message in result.stderr
