"""Early starts: which launches ask for one; no kernel that does not wait can be asked for."""

import ast
from pathlib import Path

import pytest
import torch

import exactmoe
from exactmoe.ops.triton import early as launcher
from exactmoe.ops.triton.early import early
from exactmoe.plan.architectures import ARCHITECTURES

SOURCES = Path(exactmoe.__file__).parent
KERNELS = {"segments", "logits", "select", "route_table", "quantize", "combine", "finish"}
CARD = torch.device("cuda", 0)
SILENT = {"PDL": False}


@pytest.fixture(params=ARCHITECTURES)
def architecture(request, monkeypatch) -> str:
    monkeypatch.setattr(launcher, "architecture", lambda device: request.param)
    return request.param


def test_who_asks(architecture):
    if architecture not in ("sm_90", "sm_100"):
        for joins in (False, True):
            assert early(CARD, joins) == early(CARD, joins, units=True) == SILENT
        return
    asking, waiting = {"PDL": True, "launch_pdl": True}, {"PDL": True}
    assert early(CARD) == asking
    assert early(CARD, joins=True) == waiting
    assert early(CARD, units=True) == (asking if architecture == "sm_90" else waiting)
    assert early(CARD, programs=4096) == asking
    assert early(CARD, programs=4097) == SILENT


def test_nobody_asks_or_waits_when_the_switch_is_off(architecture, monkeypatch):
    monkeypatch.setenv("EXACTMOE_EARLY", "off")
    for joins in (False, True):
        assert early(CARD, joins) == early(CARD, joins, units=True) == SILENT


def test_an_unknown_card_and_the_interpreter_do_not_ask(monkeypatch):
    assert early(torch.device("cpu")) == SILENT
    monkeypatch.setattr(launcher, "architecture", lambda device: "sm_75")
    assert early(CARD) == SILENT


def kernels_that_may_wait() -> dict[str, ast.FunctionDef]:
    found = {}
    for file in sorted((SOURCES / "kernels" / "triton").glob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and any(a.arg == "PDL" for a in node.args.args):
                found[node.name] = node
    found.pop("in_turn")
    return found


def test_each_of_them_waits_in_its_first_statement():
    found = kernels_that_may_wait()
    assert set(found) == KERNELS
    for name, kernel in found.items():
        assert ast.get_docstring(kernel), name
        assert ast.unparse(kernel.body[1]) == "in_turn(PDL)", name


def test_one_place_asks():
    """What it gives goes into a launch whole, so that PDL is never left behind."""
    asking = [
        file.relative_to(SOURCES).as_posix()
        for file in sorted(SOURCES.rglob("*.py"))
        if "launch_pdl" in file.read_text(encoding="utf-8")
    ]
    assert asking == ["ops/triton/early.py"]
