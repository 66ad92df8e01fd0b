"""`exactmoe bench` on a CPU."""

import csv
import json

import pytest
import torch

from exactmoe.cli import bench as command
from exactmoe.plan import tile

FAST = ("--device", "cpu", "--shape", "256,128,8,2", "--seconds", "0.001")


@pytest.fixture(autouse=True)
def small_ceilings(monkeypatch):
    from exactmoe.bench import ceilings

    monkeypatch.setitem(ceilings._MATRIX_SIZE, "cpu", 32)
    monkeypatch.setattr(ceilings, "GIB", 2**22)


def test_tables_and_files(run, tmp_path):
    pytest.importorskip("matplotlib")
    out, picture = tmp_path / "a.csv", tmp_path / "a.png"
    peers = "grouped_mm,humming-nvfp4,cublas"
    files = ("--csv", out, "--plot", picture)
    result = run("bench", *FAST, "--widths", "4,1", "--peers", peers, *files)
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert any(line.split() == ["|", "tokens", "|", "1", "|", "4", "|"] for line in lines)
    for name in ("floor", "exactmoe, with sort", "exactmoe, whole block", "grouped_mm", "cublas"):
        assert f"| {name}" in result.stdout
    failed = "humming-nvfp4 failed: Unsupported: humming needs an NVIDIA card; this is cpu"
    assert failed in result.stdout
    assert "shape: 256,128,8,2 (H 256, I 128, 8 experts, top 2)" in lines
    assert "experts, 1 tokens" in result.stderr
    with open(out, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["what"] for row in rows} == {"exactmoe", "grouped_mm", "humming-nvfp4", "cublas"}
    assert rows[0]["backend"] == "cpu" and float(rows[0]["us"]) > 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_json(run):
    result = run("bench", *FAST, "--widths", "1", "--parts", "experts", "--json")
    assert result.exit_code == 0 and result.stderr == ""
    content = json.loads(result.stdout)
    (record,) = content["records"]
    assert record["tokens"] == 1 and record["us"] > 0 and record["error"] < 1e-2
    assert content["numerics"] == "a16" and content["steps"] == []


def test_cliff(run):
    result = run("bench", *FAST, "--cliff", "--widths", "1,2,3", "--format", "mxfp4")
    assert result.exit_code == 0
    assert "4 steps, " in result.stdout and "whole block" not in result.stdout


def test_what_was_measured_is_kept_at_ctrl_c(run, tmp_path, monkeypatch):
    records = command.bench.Bench.records

    def stopped(self):
        yield next(records(self))
        raise KeyboardInterrupt

    monkeypatch.setattr(command.bench.Bench, "records", stopped)
    out = tmp_path / "a.csv"
    result = run("bench", *FAST, "--widths", "1", "--csv", out)
    assert result.exit_code == 130
    assert "| exactmoe, experts" in result.stdout
    assert len(out.read_text(encoding="utf-8").splitlines()) == 2


WRONG = [
    (("--shape", "1,2"), "--shape is '1,2'; allowed: glm, deepseek, small, or H,I,E,K"),
    (("--format", "bf16"), "--format is 'bf16'; allowed: nvfp4, mxfp4"),
    (("--widths", "1,x"), "--widths is '1,x'; allowed: integers from 1"),
    (("--widths", "0"), "--widths is '0'; allowed: integers from 1"),
    (("--parts", "all"), "parts are ['all']; allowed: experts, sort, block, dense"),
    (("--peers", "marlin"), "peer is 'marlin'; allowed: all, none, grouped_mm"),
    (("--numerics", "a4"), "--numerics is 'a4'; allowed: a16, a8"),
    (("--device", "tpu0"), "--device is 'tpu0'; allowed: cpu, cuda, cuda:N"),
    (("--device", "meta"), "--device is 'meta'; allowed: cpu, cuda, cuda:N"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_values_that_are_not_allowed(run, arguments, message):
    result = run("bench", *FAST, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr and result.stdout == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a card")
def test_no_card(run):
    result = run("bench", "--device", "cuda")
    assert result.exit_code == 2 and "torch sees no card; allowed: cpu" in result.stderr


def test_defaults_follow_the_device(monkeypatch):
    settings = command.What(device="cpu").settings(seed=0)
    assert settings.shape.name == "small" and settings.peers == ("none",)
    assert settings.format == "nvfp4" and settings.widths == command.WIDTHS["cpu"]
    monkeypatch.setattr(command, "_device", lambda name: torch.device("cuda", 0))
    settings = command.What().settings(seed=0)
    assert settings.shape.name == "glm" and settings.peers == ("all",)
    assert settings.widths == (1, 2, 4, 8, 16, 64, 256, 1024, 4096)
    monkeypatch.setattr(command, "architecture_name", lambda device: "sm_90")
    settings = command.What(cliff=True, shape="deepseek").settings(seed=0)
    assert settings.format == "mxfp4" and settings.peers == ("none",)
    assert settings.parts == ("experts",) and set(range(1, 18)) < set(settings.widths)
    tiles = [tile("cuda", "sm_90", "down", width * 6, 256) for width in settings.widths]
    assert len(set(tiles)) > 3
