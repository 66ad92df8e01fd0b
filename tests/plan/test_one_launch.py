"""What explain says of the launches that a call's routed experts take on sm_90."""

import importlib

import pytest

from exactmoe import Numerics
from exactmoe.plan import Plan, WeightShape, tiles_of
from exactmoe.plan.tiles import in_one_launch

explain = importlib.import_module("exactmoe.plan.explain")
SHAPES = tuple(WeightShape("nvfp4", *shape) for shape in ((256, 128), (256, 128), (128, 256)))
ONE, TWO = "in the launch of gate_up", "in a launch of its own"


@pytest.mark.parametrize("numerics", [Numerics(), Numerics.preset("a8")], ids=["a16", "a8"])
@pytest.mark.parametrize(
    ("num_slots", "way", "launch"),
    [(64, None, ONE), (65, None, TWO), (65, "one", ONE), (64, "two", TWO), (1, "auto", ONE)],
)
def test_of_down_explain_says_its_launch(numerics, num_slots, way, launch, monkeypatch):
    monkeypatch.setattr(explain, "architecture_name", lambda device: "sm_90")
    monkeypatch.delenv("EXACTMOE_EXPERTS", raising=False)
    if way is not None:
        monkeypatch.setenv("EXACTMOE_EXPERTS", way)
    plan = Plan("cuda", "cuda:0", "", (), units="auto" if numerics.activation == "a8" else "")
    gate_up, down = tiles_of(plan, numerics, SHAPES, num_slots, (8,))
    assert down.reason.endswith(f"; {launch}")
    assert ONE not in gate_up.reason and TWO not in gate_up.reason
    assert in_one_launch(num_slots, way or "auto") == (launch == ONE)
