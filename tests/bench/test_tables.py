"""Tables, notes, CSV and plot of given numbers."""

import csv
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from exactmoe.bench import notes, tables, write_csv, write_plot
from exactmoe.bench.plot import curves
from exactmoe.bench.record import BLOCK, EXPERTS, OURS, Record
from exactmoe.bench.timing import Timing
from exactmoe.errors import Unsupported


def point(part, what, tokens, us, **more):
    return Record(part, what, tokens, Timing(us, us - 1, us + 2), **more)


RECORDS = [
    point(EXPERTS, OURS, 1, 40.0, floor_us=27.0, nbytes=113e6, distinct_experts=8.0, error=3e-3),
    point(EXPERTS, OURS, 64, 900.0, floor_us=720.0, nbytes=3.4e9, distinct_experts=241.2),
    point(BLOCK, OURS, 1, 71.0, floor_us=30.0),
    point(EXPERTS, "tortoise", 1, 80.0, floor_us=27.0, error=float("nan"), note="slow"),
    point(EXPERTS, "tortoise", 64, 1350.0, floor_us=720.0, same_bits=False),
    Record(EXPERTS, "hare", 0, note="ImportError: no hare"),
    point("dense 64", OURS, 1, 10.0, floor_us=8.0, nbytes=1e6),
]


def test_derived_numbers():
    first = RECORDS[0]
    assert first.us == 40.0 and first.share == 27 / 40
    assert first.gigabytes_per_second == pytest.approx(113e6 / 40e-6 / 1e9)
    failed = RECORDS[5]
    assert failed.us is None and failed.share is None and failed.gigabytes_per_second is None
    assert RECORDS[3].to_dict()["error"] == "nan"


def lines_of(table):
    console = Console(width=120)
    with console.capture() as captured:
        console.print(table)
    lines = captured.get().splitlines()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "|" in line]


def test_tables():
    experts, dense = tables(RECORDS)
    rows = {row[0]: row[1:] for row in lines_of(experts)}
    assert rows["tokens"] == ["1", "64"]
    assert rows["distinct experts"] == ["8.0", "241"]
    assert rows["floor"] == ["27.0", "720"]
    assert rows["exactmoe, experts"] == ["40.0", "900"]
    assert rows["share of the floor"] == ["68%", "80%"]
    assert rows["exactmoe, whole block"] == ["71.0", ""]
    assert rows["tortoise"] == ["80.0", "1350"]
    assert rows["times ours"] == ["2.00", "1.50"]
    assert "hare" not in rows
    assert [row[0] for row in lines_of(dense)][2:4] == ["floor", "exactmoe, dense 64"]


def test_notes_say_why_a_peer_failed():
    assert notes(RECORDS) == [
        "tortoise: slow; a token's bits at other widths: other",
        "hare failed: ImportError: no hare",
    ]


def test_csv(tmp_path):
    path = tmp_path / "new" / "out.csv"
    write_csv(str(path), RECORDS, {"machine": "a, b", "shape": "glm"})
    with open(path, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(RECORDS)
    assert rows[0]["machine"] == "a, b" and rows[0]["us"] == "40" and rows[0]["share"] == "0.675"
    assert rows[5]["us"] == "" and rows[5]["note"] == "ImportError: no hare"


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / "out.png"
    write_plot(str(path), RECORDS, "title")
    assert path.read_bytes().startswith(b"\x89PNG")
    found = curves(RECORDS)
    assert {what: [r.tokens for r in points] for what, points in found.items()} == {
        OURS: [1, 64],
        "tortoise": [1, 64],
    }


def test_no_peer_has_our_color_nor_another_s(tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure").Figure
    from matplotlib.colors import to_hex

    drawn = []
    monkeypatch.setattr(figure, "savefig", lambda self, path: drawn.append(self))
    peers = [replace(RECORDS[0], what=f"peer {i}") for i in range(6)]
    write_plot(str(tmp_path / "a.png"), [RECORDS[0], *peers], "title")
    for panel in drawn[0].axes:
        colors = [to_hex(line.get_color()) for line in panel.lines if line.get_marker() == "o"]
        assert len(colors) == len(set(colors)) == 7


def test_plot_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(Unsupported, match=r"pip install 'exactmoe\[plot\]'"):
        write_plot(str(tmp_path / "a.png"), RECORDS, "title")
