"""`exactmoe routes`: a text through a demo model, a recorded trace, and refusals."""

import json
from pathlib import Path

import pytest

from exactmoe.report.route_trace import RouteTrace

TEXT = Path(__file__).resolve().parents[2] / "demo" / "heldout" / "colorsys.py.txt"


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """A text of some hundred tokens through the demo of GLM; the folder that was written."""
    from typer.testing import CliRunner

    from exactmoe.cli.app import build

    folder = tmp_path_factory.mktemp("routes")
    text = folder / "text.txt"
    text.write_text(TEXT.read_text(encoding="utf-8")[:2500], encoding="utf-8")
    demo = TEXT.parents[1] / "glm5_next"
    arguments = ["routes", str(demo), "--text", str(text), "--out", str(folder / "out"), "--json"]
    result = CliRunner().invoke(build(), arguments)
    assert result.exit_code == 0, result.stderr
    return folder / "out", json.loads(result.stdout)


def test_a_text(traced):
    folder, content = traced
    assert [row["layer"] for row in content["layers"]] == [1, 2, 3, 4, 5]
    assert {row["tokens"] for row in content["layers"]} == {content["tokens"]}
    assert {row["lost"] for row in content["layers"]} == {0}
    assert content["tokens"] > 512  # more than one call
    assert content["union"]["1"] == content["uniform_union"]["1"] == 4
    assert content["union"]["16"] < content["uniform_union"]["16"]
    shares = content["busiest_card_share"]
    assert 0.5 <= shares["by route load"]["1"] < shares["even"]["1"]
    assert {str(path) for path in folder.iterdir()} == set(content["files"])


def test_the_recorded_trace_gives_the_same(run, traced, glm, tmp_path):
    folder, content = traced
    arguments = ("--trace", folder / "routes.npz", "--out", tmp_path / "again", "--json")
    again = json.loads(run("routes", glm, *arguments).stdout)
    assert {**again, "files": None} == {**content, "files": None}
    placement = ("--placement", folder / "placement.json")
    shown = run("routes", glm, *arguments[:-1], *placement).stdout
    assert "busiest of 2 cards, placement placement.json" in shown
    assert (tmp_path / "again" / "load.png").read_bytes() == (folder / "load.png").read_bytes()


def test_a_parquet_trace_of_another_program(run, traced, glm, tmp_path):
    """It has the columns and nothing else: experts are the model's."""
    import pyarrow.parquet as pq

    folder, content = traced
    RouteTrace.load(folder / "routes.npz").save(tmp_path / "routes.parquet")
    table = pq.read_table(tmp_path / "routes.parquet").replace_schema_metadata(None)
    pq.write_table(table, tmp_path / "mine.parquet")
    arguments = ("--trace", tmp_path / "mine.parquet", "--out", tmp_path / "out", "--json")
    again = json.loads(run("routes", glm, *arguments).stdout)
    assert {**again, "files": None} == {**content, "files": None}
    other = run("routes", TEXT.parents[1] / "deepseek_v4", *arguments)
    assert other.exit_code == 2
    assert "does not say how many experts layers [5] have" in other.stderr


def test_a_text_is_saved_as_parquet(run, glm, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(TEXT.read_text(encoding="utf-8")[:400], encoding="utf-8")
    arguments = ("--text", text, "--out", tmp_path / "out", "--save-as", "parquet", "--json")
    content = json.loads(run("routes", glm, *arguments).stdout)
    assert content["files"][-1] == str(tmp_path / "out" / "routes.parquet")
    trace = RouteTrace.load(tmp_path / "out" / "routes.parquet")
    assert {len(routes.steps) for routes in trace.layers.values()} == {content["tokens"]}


def test_refusals(run, traced, glm, tmp_path):
    trace = traced[0] / "routes.npz"
    other = TEXT.parents[1] / "deepseek_v4"
    for arguments, message in {
        (glm,): "--text and --trace: allowed is one of them",
        (glm, "--text", "a", "--trace", "b"): "--text and --trace: allowed is one of them",
        (glm, "--text", tmp_path / "none.txt"): "none.txt cannot be read",
        (glm, "--text", TEXT, "--save-as", "csv"): "--save-as is 'csv'; allowed: npz, parquet",
        (glm, "--trace", tmp_path / "none.npz"): "is no trace of routes",
        (other, "--trace", trace): "it is of another model",
        (glm, "--trace", trace, "--placement", trace): "is no placement",
    }.items():
        result = run("routes", *arguments, "--out", tmp_path / "out")
        assert result.exit_code == 2
        assert message in result.stderr
    assert not (tmp_path / "out").exists()


def test_without_matplotlib_the_message_says_what_to_install(run, traced, glm, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    result = run(
        "routes", glm, "--trace", traced[0] / "routes.npz", "--out", traced[0].parent / "x"
    )
    assert result.exit_code == 2
    assert "pip install 'exactmoe[plot]'" in result.stderr
