"""Experts of `experts_implementation` keep canonical order, which no kernel on fp8 units reads."""

import importlib

import pytest
import torch

from exactmoe import Numerics
from exactmoe.errors import Unsupported
from exactmoe.hf.experts import numerics_of
from exactmoe.plan import ARCHITECTURES, WeightShape, choose

SHAPES = (
    WeightShape("mxfp4", 128, 256),
    WeightShape("mxfp4", 128, 256),
    WeightShape("mxfp4", 256, 128),
)
CARD = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def sm_90(monkeypatch):
    # The package gives the function of this name.
    module = importlib.import_module("exactmoe.plan.choose")
    monkeypatch.setattr(module, "architecture_of", lambda device: ARCHITECTURES["sm_90"])
    monkeypatch.setattr(module, "_importable", lambda name: True)
    module._chosen.cache_clear()
    yield
    module._chosen.cache_clear()


def test_class_a8_names_the_bf16_units():
    module = torch.nn.Module()
    module.gate_up_proj_scale_inv = None  # the stock FP8Experts with FP4 weights
    numerics = numerics_of(module)
    assert (numerics.activation, numerics.units) == ("a8", "bf16")
    assert choose(numerics, CARD, "auto", SHAPES, fixed_order=True).backend == "triton"
    with pytest.raises(Unsupported, match="it runs units='bf16'"):
        choose(Numerics.preset("a8"), CARD, "auto", SHAPES, fixed_order=True)


def test_class_a16_is_as_it_was():
    assert numerics_of(torch.nn.Module()) == Numerics()
