"""The report: bytes compared, counts, the first difference, JSON and text."""

import json

import pytest
import torch
from rich.console import Console

from exactmoe.errors import BitMismatch, ConfigError
from exactmoe.proof import Report, fingerprint, table
from exactmoe.proof.compare import first_difference, hexadecimal, same_bytes

NAN_16, OTHER_NAN_16 = 0x7FC0, 0x7FC1


def bf16(*patterns):
    signed = [pattern - 0x10000 if pattern >= 0x8000 else pattern for pattern in patterns]
    return torch.tensor(signed, dtype=torch.int16).view(torch.bfloat16).view(1, -1)


def test_bytes_not_values():
    assert not same_bytes(bf16(0x0000), bf16(0x8000))  # +0 and -0
    assert same_bytes(bf16(NAN_16), bf16(NAN_16))
    assert not same_bytes(bf16(NAN_16), bf16(OTHER_NAN_16))
    assert first_difference(bf16(1, 2, 3), bf16(1, 2, 4)) == (0, 2)
    assert first_difference(bf16(1, 2), bf16(1, 2)) is None
    assert hexadecimal(bf16(0x8000)[0, 0]) == "0x8000"
    assert hexadecimal(torch.tensor(-1.0)) == "0xBF800000"
    with pytest.raises(ConfigError, match="values are torch.float64; allowed: bfloat16, float32"):
        same_bytes(torch.zeros(1).double(), torch.zeros(1).double())


def failed():
    report = Report("it")
    report.compare("width", "", torch.zeros(2, 3), torch.zeros(2, 3))
    wrong = torch.zeros(2, 3)
    wrong[1, 2] = -0.0
    report.compare("position", "block", torch.zeros(2, 3), wrong, width=9, first_token=4)
    report.compare("position", "later", torch.zeros(2, 3), wrong - 1)
    return report


def test_counts_and_first_difference():
    report = failed()
    assert not report.ok
    assert (report.comparisons, report.nbytes, report.mismatches) == (6, 72, 3)
    (first,) = report.differences
    assert str(first) == (
        "position (block): width 9, token 5, element 2: expected 0 (0x00000000), "
        "found -0 (0x80000000)"
    )
    with pytest.raises(BitMismatch, match=r"it: 3 rows differ\nposition \(block\): width 9"):
        report.raise_on_mismatch()


def test_a_report_without_a_comparison_is_no_proof():
    report = Report("it")
    assert not report.ok
    with pytest.raises(BitMismatch, match="it: nothing was compared"):
        report.raise_on_mismatch()


def test_json_and_text():
    content = json.loads(json.dumps(failed().to_dict(), allow_nan=False))
    assert content["dimensions"]["position"]["first"]["found_bits"] == "0x80000000"
    assert content["dimensions"]["width"] == {
        "comparisons": 2,
        "bytes": 24,
        "mismatches": 0,
        "first": None,
    }
    assert "it: FAILED" in str(failed())
    console = Console(width=100)
    with console.capture() as shown:
        console.print(table([failed(), failed()]))
    assert shown.get().count("3 differ") == 2
    assert shown.get().count("equal") == 2


def test_a_difference_of_nan_is_json():
    report = Report("it")
    report.compare("width", "", bf16(NAN_16), bf16(OTHER_NAN_16))
    json.dumps(report.to_dict(), allow_nan=False)


def test_fingerprint():
    machine = fingerprint()
    assert machine["architecture"] == "cpu"
    assert machine["contract"] == 1
    assert machine["torch"] == torch.__version__
    assert set(machine) >= {"exactmoe", "numba", "python", "system", "cpu", "cores", "threads"}
    json.dumps(machine)


def test_an_error_is_held_against_its_bound():
    report = Report("it")
    report.compare("width", "", bf16(1), bf16(1))
    report.measure("dot", 1e-6, 1e-5)
    report.measure("dot", 1e-7, 1e-5)
    assert report.ok and report.bounds["dot"].found == 1e-6
    for wrong in (2e-5, float("nan")):
        excess = Report("it", dimensions=report.dimensions)
        excess.measure("dot", wrong, 1e-5)
        excess.measure("dot", 1e-7, 1e-5)
        assert not excess.ok and excess.failed
        with pytest.raises(BitMismatch, match="dot: error .*, allowed: 1e-05"):
            excess.raise_on_mismatch()
        assert "TOO LARGE" in str(excess)
        json.dumps(excess.to_dict(), allow_nan=False)


def test_what_cannot_run_is_shown():
    report = Report("it")
    report.not_run["captured"] = "no CUDA graphs"
    assert not report.ok and not report.failed
    assert "captured: not run: no CUDA graphs" in str(report)
    assert report.to_dict()["not_run"] == {"captured": "no CUDA graphs"}
    console = Console(width=100)
    with console.capture() as shown:
        console.print(table([report]))
    assert "not run: no CUDA graphs" in shown.get()


def test_the_table_has_seconds_and_a_sum():
    report = Report("it", seconds=2.5, times={"width": 1.5})
    values = torch.zeros(3, 8)
    report.compare("width", "case", values, values)
    console = Console(width=100)
    with console.capture() as shown:
        console.print(table([report]))
    lines = [line.replace("│", " ").split() for line in shown.get().splitlines()]
    assert ["it", "width", "3", "96", "1.5", "equal"] in lines
    assert ["all", "3", "96", "2.5", "ok"] in lines
