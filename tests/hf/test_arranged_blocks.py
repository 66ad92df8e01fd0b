"""Whole blocks whose experts' parameters are in the order of a kernel: who reads the model's
parameters through torch or transformers gets the checkpoint's.
"""

import copy
import io
from pathlib import Path

import pytest
import torch
from torch import nn

from arranged_paths import LAYOUTS, arranged_backend
from exactmoe import MoELayer
from exactmoe.errors import ConfigError
from exactmoe.hf import blocks, load_model, to_canonical
from layers import assert_same_bits
from saved_bytes import assert_same_tensors, assert_saves_as

SOURCE = Path(__file__).parents[2] / "demo" / "glm5_next"
PROMPT = torch.tensor([[5, 9, 3, 1, 7, 2]])


@pytest.fixture(params=LAYOUTS)
def backend(request, monkeypatch):
    with arranged_backend(monkeypatch, request.param):
        yield


@pytest.fixture
def model(backend):
    model = load_model(SOURCE, backend="cuda", progress=False)
    logits(model)
    assert layouts(model) == {"fragment"}
    return model


@pytest.fixture(scope="module")
def plain():
    return load_model(SOURCE, backend="cpu", progress=False)


def logits(model: nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(PROMPT).logits.clone()


def layouts(model: nn.Module) -> set[str]:
    return {layer.bank.layout for _, _, layer in blocks(model) if isinstance(layer, MoELayer)}


def experts_of(model: nn.Module) -> nn.Module:
    return next(m.experts for _, m, layer in blocks(model) if isinstance(layer, MoELayer))


def test_bits_and_parameters(model, plain):
    assert_same_bits(logits(model), logits(plain))
    raw = [experts_of(m).down_proj.view(torch.uint8) for m in (model, plain)]
    assert not raw[0].equal(raw[1])
    to_canonical(model)
    raw = [experts_of(m).down_proj.view(torch.uint8) for m in (model, plain)]
    assert raw[0].equal(raw[1])
    assert_same_bits(logits(model), logits(plain))
    assert layouts(model) == {"fragment"}


def test_state_dicts_and_saving(model, plain, tmp_path):
    assert_same_tensors(model.state_dict(), plain.state_dict())
    assert_saves_as(model, SOURCE, tmp_path)
    assert layouts(model) == {"fragment"}
    model.load_state_dict(plain.state_dict())
    assert_same_bits(logits(model), logits(plain))


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, saved_and_loaded])
def test_copies(duplicate, model, plain):
    other = duplicate(model)
    assert_same_tensors(dict(other.named_parameters()), dict(plain.named_parameters()))
    assert_same_bits(logits(model), logits(plain))
    assert layouts(model) == {"fragment"}
    assert_same_bits(logits(other), logits(plain))
    assert_same_tensors(other.state_dict(), plain.state_dict())
    experts_of(model).down_proj.data.zero_()
    assert_same_bits(logits(other), logits(plain))


@pytest.mark.parametrize("part", ["model", "experts"])
def test_moving(part, model, plain):
    (model if part == "model" else experts_of(model)).to("cpu")
    now = [experts_of(m).gate_up_proj.view(torch.uint8) for m in (model, plain)]
    assert now[0].equal(now[1])
    assert_same_bits(logits(model), logits(plain))


def test_a_written_parameter_is_refused_and_another_one_is_seen(model, plain):
    other = copy.deepcopy(plain)
    for changed in (model, other):
        to_canonical(changed)
        with torch.no_grad():
            experts_of(changed).down_proj.view(torch.uint8)[1].zero_()
    assert_same_bits(logits(model), logits(other))
    gate = next(m.gate for _, m, layer in blocks(model) if isinstance(layer, MoELayer))
    with torch.no_grad():
        gate.weight.mul_(1.0)  # the layer is built anew over parameters in canonical order
    assert_same_bits(logits(model), logits(other))
    with torch.no_grad():
        experts_of(model).down_proj.view(torch.uint8)[2].zero_()
    with pytest.raises(ConfigError, match="down_codes changed while the experts are in fragment"):
        logits(model)
