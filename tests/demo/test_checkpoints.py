"""The two demo checkpoints are complete, small, and stored as published ones are."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

ROOT = Path(__file__).resolve().parents[2]

MAX_BYTES = 12_000_000
E4M3, E8M0 = "F8_E4M3", "F8_E8M0"


def stored(model):
    """Tensor name -> (dtype as safetensors spells it, shape)."""
    result = {}
    for path in sorted((ROOT / "demo" / model).glob("*.safetensors")):
        with safe_open(path, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                part = opened.get_slice(name)
                result[name] = (part.get_dtype(), tuple(part.get_shape()))
    return result


def config(model):
    return json.loads((ROOT / "demo" / model / "config.json").read_text())


@pytest.mark.parametrize("model", ["glm5_next", "deepseek_v4"])
def test_size(model):
    files = list((ROOT / "demo" / model).iterdir())
    assert 8_000_000 < sum(path.stat().st_size for path in files) < MAX_BYTES


def test_glm_experts_are_modelopt_nvfp4():
    tensors, text = stored("glm5_next"), config("glm5_next")["text_config"]
    hidden, size = text["hidden_size"], text["moe_intermediate_size"]
    shapes = {"gate_proj": (size, hidden), "up_proj": (size, hidden), "down_proj": (hidden, size)}
    for layer, kind in enumerate(text["mlp_layer_types"]):
        prefix = f"model.language_model.layers.{layer}.mlp"
        if kind == "dense":
            assert tensors[f"{prefix}.gate_proj.weight"][0] == "BF16"
            continue
        assert tensors[f"{prefix}.gate.e_score_correction_bias"][0] == "F32"
        for expert in range(text["n_routed_experts"]):
            for name, (rows, columns) in shapes.items():
                weight = f"{prefix}.experts.{expert}.{name}.weight"
                assert tensors[weight] == ("U8", (rows, columns // 2))
                assert tensors[f"{weight}_scale"] == (E4M3, (rows, columns // 16))
                assert tensors[f"{weight}_scale_2"] == ("F32", ())
    assert Counter(text["mlp_layer_types"]) == {"dense": 1, "sparse": 5}


def test_glm_index_names_every_tensor():
    folder = ROOT / "demo" / "glm5_next"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(stored("glm5_next"))
    assert len(set(index["weight_map"].values())) == 2


def test_deepseek_experts_are_native():
    tensors, fields = stored("deepseek_v4"), config("deepseek_v4")
    hidden, size = fields["hidden_size"], fields["moe_intermediate_size"]
    assert hidden % 128 == 0 and size % 128 == 0
    shapes = {"w1": (size, hidden), "w3": (size, hidden), "w2": (hidden, size)}
    for layer, kind in enumerate(fields["mlp_layer_types"]):
        prefix = f"layers.{layer}.ffn"
        if kind == "moe":
            assert tensors[f"{prefix}.gate.bias"][0] == "F32"
        for expert in range(fields["n_routed_experts"]):
            for name, (rows, columns) in shapes.items():
                linear = f"{prefix}.experts.{expert}.{name}"
                assert tensors[f"{linear}.weight"] == ("I8", (rows, columns // 2))
                assert tensors[f"{linear}.scale"] == (E8M0, (rows, columns // 32))
    assert "hash_moe" in fields["mlp_layer_types"]
    assert not [name for name in tensors if name.startswith("model.")]


def test_hash_table_rows_are_distinct():
    with safe_open(ROOT / "demo/deepseek_v4/model.safetensors", "pt") as opened:
        table = opened.get_tensor("layers.0.ffn.gate.tid2eid")
    fields = config("deepseek_v4")
    assert table.shape == (fields["vocab_size"], fields["num_experts_per_tok"])
    ordered = table.sort(-1).values
    assert bool((ordered[:, 1:] > ordered[:, :-1]).all())
    assert torch.equal(table.unique(), torch.arange(fields["n_routed_experts"]))


def test_heldout_text_has_its_licence():
    folder = ROOT / "demo" / "heldout"
    assert "PYTHON SOFTWARE FOUNDATION LICENSE" in (folder / "LICENSE.txt").read_text()
    size = sum(path.stat().st_size for path in folder.glob("*.py.txt"))
    assert 100_000 < size < 210_000
    assert all(re.fullmatch(r"\w+\.py\.txt|LICENSE\.txt", path.name) for path in folder.iterdir())
