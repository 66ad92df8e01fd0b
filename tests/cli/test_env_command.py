"""`exactmoe env`, and the docs page that comes from the same table."""

import json
from pathlib import Path

import pytest

from exactmoe import env
from exactmoe.report.switches import markdown

PAGE = Path(__file__).resolve().parents[2] / "docs" / "env.md"


@pytest.fixture(autouse=True)
def no_switches(monkeypatch):
    for name in env.SWITCHES:
        monkeypatch.delenv(name, raising=False)


def test_the_docs_page_is_current(run):
    assert PAGE.read_text(encoding="utf-8") == markdown()
    assert run("env", "--markdown").stdout == markdown()


def test_every_switch_with_its_value_here(run, monkeypatch):
    monkeypatch.setenv("EXACTMOE_THREADS", "3")
    monkeypatch.setenv("EXACTMOE_UNION", "off")
    rows = {row["name"]: row for row in json.loads(run("env", "--json").stdout)["switches"]}
    assert list(rows) == list(env.SWITCHES)
    assert (rows["EXACTMOE_THREADS"]["value"], rows["EXACTMOE_THREADS"]["default"]) == (3, None)
    assert (rows["EXACTMOE_UNION"]["value"], rows["EXACTMOE_UNION"]["default"]) == ("off", "on")
    assert rows["EXACTMOE_BACKEND"]["value"] == "auto"
    shown = run("env").stdout
    for name in env.SWITCHES:
        assert name in shown


def test_a_value_that_is_not_allowed(run, monkeypatch):
    monkeypatch.setenv("EXACTMOE_UNION", "maybe")
    result = run("env")
    assert result.exit_code == 2
    assert "EXACTMOE_UNION='maybe'; allowed: on, off" in result.stderr


def test_a_secret_is_not_shown(run, monkeypatch):
    monkeypatch.setenv("EXACTMOE_API_KEY", "sk-word")
    assert env.read("EXACTMOE_API_KEY").text == "sk-word"
    assert "sk-word" not in repr(env.changed())
    for flags in ((), ("--json",)):
        result = run("env", *flags)
        assert result.exit_code == 0
        assert "sk-word" not in result.output
        assert "set, not shown" in result.output
