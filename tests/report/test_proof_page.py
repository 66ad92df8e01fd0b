"""The page of a proof: every difference, error and reason is on it, and nothing of it is HTML."""

import json

import torch

from exactmoe.proof import Report
from exactmoe.report.proof_page import proof_page


def content(*reports, **more):
    machine = {"architecture": "cpu", "contract": 1, "torch": "2.13"}
    parts = [json.loads(json.dumps(report.to_dict())) for report in reports]
    return {"path": "<model>", "ok": True, "machine": machine, "reports": parts, **more}


def test_a_matrix_of_subjects_and_dimensions():
    good, bad = Report("layer 1"), Report("layer <2>")
    good.compare("width", "", torch.zeros(3, 4), torch.zeros(3, 4))
    bad.compare("width", "", torch.zeros(3, 4), torch.ones(3, 4), width=9, first_token=4)
    bad.compare("order", "", torch.zeros(1, 4), torch.zeros(1, 4))
    bad.measure("dots", 0.5, 0.25)
    bad.not_run["streams"] = "no <GPU>"
    bad.times["width"] = 1.234
    text = proof_page(content(good, bad, ok=False))
    assert "<th>layer 1</th><th>layer &lt;2&gt;</th>" in text
    assert "<td>equal: 3 rows, 48 bytes</td>" in text
    assert '<td class="bad">DIFFER: 3 of 3 rows, first: token 4 of 9</td>' in text
    assert "<tr><td>order</td><td></td><td>equal: 1 rows, 16 bytes</td></tr>" in text
    assert "<td>dots</td><td>0.5</td><td>0.25</td>" in text
    assert "<td>streams</td><td>no &lt;GPU&gt;</td>" in text
    assert "<tr><td>width</td><td></td><td>1.23</td></tr>" in text
    assert "<tr><td>all</td>" not in text  # it took no time
    assert "FAILED: 7 rows, 112 bytes compared on this machine, 3 rows differ." in text
    assert "Proof of &lt;model&gt;" in text
    assert "Beside the other machine" not in text


def test_beside_another_machine():
    compared = [
        {"name": "a", "result": "DIFFERS", "nbytes": 4096, "reason": "1 of 16 rows, first 2"},
        {"name": "b", "result": "not compared", "nbytes": 0, "reason": "only there"},
    ]
    against = {
        "file": "theirs.json",
        "machine": {"architecture": "sm_90", "driver": "580.82.07"},
        "ok": False,
        "bytes": 4096,
        "compared": compared,
    }
    text = proof_page(content(Report("it"), against=against))
    assert "<tr><td>architecture</td><td>cpu</td><td>sm_90</td></tr>" in text
    assert "<tr><td>driver</td><td></td><td>580.82.07</td></tr>" in text
    assert '<td>a</td><td class="bad">DIFFERS</td><td class="number">4,096</td>' in text
    assert "DO NOT AGREE: 4,096 bytes compared." in text
    assert "This machine DOES NOT AGREE with that of theirs.json." in text
    assert "<td>only there</td>" in text
