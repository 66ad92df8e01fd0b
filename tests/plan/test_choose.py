"""Which backend runs, and what says so."""

import json

import pytest
import torch

from exactmoe import DenseMLP, ExpertBank, Limits, Numerics
from exactmoe.errors import ConfigError, Unsupported
from exactmoe.plan import BACKENDS, WeightShape, choose, explain
from layers import assert_same_bits, exact_weight, layer_of, normal, random_bank, random_call

CPU = torch.device("cpu")
A16, A8 = Numerics(), Numerics.preset("a8")


def test_auto_takes_the_fast_path_of_the_device(monkeypatch):
    monkeypatch.delenv("EXACTMOE_BACKEND", raising=False)
    plan = choose(A16, CPU)
    assert (plan.backend, plan.device) == ("cpu", "cpu")
    reasons = {r.backend: r.reason for r in plan.rejected}
    assert list(reasons) == ["cuda", "triton", "reference"]
    assert reasons["cuda"] == "it needs a GPU"
    assert reasons["triton"].startswith("it needs a GPU (TRITON_INTERPRET=1 lets")
    assert str(plan).startswith("cpu on cpu: ")
    assert "not reference: " in str(plan)


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_a_named_backend_runs_whatever_the_environment_says(name, monkeypatch):
    monkeypatch.setenv("EXACTMOE_BACKEND", "reference" if name == "cpu" else "cpu")
    plan = choose(A16, CPU, name)
    assert plan.backend == name
    assert name in plan.reason and "asked for" in plan.reason
    assert {r.backend for r in plan.rejected} == set(BACKENDS) - {name}


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_the_environment_decides_for_auto(name, monkeypatch):
    monkeypatch.setenv("EXACTMOE_BACKEND", name)
    plan = choose(A16, CPU)
    assert plan.backend == name
    assert f"EXACTMOE_BACKEND={name}" in plan.reason


def test_a_backend_that_does_not_exist(monkeypatch):
    names = "auto, cuda, triton, cpu, reference"
    with pytest.raises(ConfigError, match=f"backend is 'rocm'; allowed: {names}"):
        choose(A16, CPU, "rocm")
    monkeypatch.setenv("EXACTMOE_BACKEND", "fast")
    with pytest.raises(ConfigError, match=f"EXACTMOE_BACKEND='fast'; allowed: {names}"):
        choose(A16, CPU)


@pytest.mark.parametrize("device", ["meta", "mps"])
@pytest.mark.parametrize("name", ["auto", "cpu", "reference"])
def test_a_device_without_kernels_is_refused(device, name):
    with pytest.raises(Unsupported, match=f"^device is {device}; this version runs on: cpu, cuda"):
        choose(A16, torch.device(device), name)


@pytest.mark.parametrize("units", ["auto", "fp8"])
def test_units_on_a_cpu_are_named(units):
    plan = choose(Numerics(activation="a8", units=units, slot="f32"), CPU, "cpu")
    assert f"units={units!r} run as bf16 units" in plan.reason
    assert "units" not in choose(A16, CPU, "cpu").reason


def test_a_layer_follows_the_environment_at_each_call(rng, monkeypatch):
    layer = layer_of(random_bank(rng, "nvfp4", 2, 64, 32), 1, "auto")
    call = random_call(rng, layer, 2)
    results = []
    for name in ("cpu", "reference"):
        monkeypatch.setenv("EXACTMOE_BACKEND", name)
        assert layer.plan().backend == layer.explain().plan.backend == name
        results.append(layer.experts(*call))
    assert_same_bits(*results)


def test_explain_counts_pieces_and_fp8_experts(rng):
    flat = random_bank(rng, "mxfp4", 3, 128, 128)
    values = torch.ones(3, 128, 128)
    spread = exact_weight("mxfp4", values)
    spread.scales[1, 5, 0] = 127 + 15  # 15 binades from its neighbours in one piece of 128
    bank = ExpertBank(flat.gate, spread, exact_weight("nvfp4", values, [0, 1, 2]))
    layer = layer_of(bank, 2, "cpu", numerics="a8", limits=Limits(max_rows=10))
    for width, pieces in ((1, 1), (10, 1), (11, 2), (1000, 100)):
        assert layer.explain(width).pieces == pieces
    found = layer.explain(8)
    assert found.formats == ("mxfp4", "mxfp4", "nvfp4")
    assert found.fp8_experts == (3, 2, 3)
    assert found.num_experts == 3
    text = str(found)
    assert "up mxfp4 (2 of 3 exact on fp8 units)" in text
    assert "8 tokens in 1 piece;" in text
    again = json.loads(json.dumps(found.to_dict()))
    assert again["fp8_experts"] == [3, 2, 3]
    assert again["numerics"] == Numerics.preset("a8").to_dict()
    assert again["backend"] == "cpu" and "reference" in again["rejected"]


def test_explain_of_a_dense_mlp(rng):
    dense = DenseMLP(normal(rng, 32, 64), normal(rng, 32, 64), normal(rng, 64, 32), backend="cpu")
    found = dense.explain(3)
    assert (found.formats, found.num_experts, found.fp8_experts) == (("bf16",) * 3, 1, (0, 0, 0))
    plan = choose(A8, CPU, "cpu")
    weights = [dense.bank.gate, dense.bank.up, dense.bank.down]
    assert explain(plan, A8, Limits(), 3, weights).plan is plan


def test_shapes_know_where_rows_begin():
    codes = torch.zeros(1, 8, 128, dtype=torch.bfloat16)
    assert WeightShape.of("bf16", codes) == ("bf16", 8, 128, True, True)
    assert WeightShape.of("bf16", codes[:, :, 8:]).aligned
    assert not WeightShape.of("bf16", codes[:, :, 4:]).aligned
    assert not WeightShape.of(
        "bf16", torch.zeros(1, 8, 132, dtype=torch.bfloat16)[..., :128]
    ).aligned
    assert not WeightShape.of("bf16", codes.transpose(1, 2)).aligned
