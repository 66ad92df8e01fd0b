"""The load report, and the A28 matrix: what is missing, extra or malformed is named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoint_maker import (
    Tensors,
    deepseek_config,
    deepseek_tensors,
    glm_config,
    glm_tensors,
    modelopt,
    native,
    write,
)
from exactmoe.checkpoint import Checkpoint, LoadReport, audit, read_layer
from exactmoe.errors import CheckpointError

MOE = "model.language_model.layers.1.mlp"
FAMILIES = [(glm_config, glm_tensors), (deepseek_config, deepseek_tensors)]


def _require_partition(report: LoadReport, tensors: Tensors) -> None:
    """Every tensor of the checkpoint is in exactly one list, and the bytes add up."""
    named = [entry.info.name for entry in (*report.consumed, *report.ignored)]
    named += [finding.tensor for finding in report.errors if finding.info is not None]
    assert sorted(named) == sorted(tensors)
    content = report.to_dict()
    parts = [*content["consumed"].values(), *content["ignored"].values(), content["errors"]]
    assert sum(part["bytes"] for part in parts) == content["total"]["bytes"] == report.nbytes
    assert sum(part["tensors"] for part in parts) == content["total"]["tensors"] == len(tensors)
    assert report.nbytes == sum(t.numel() * t.element_size() for t in tensors.values())


def _refused(path: Path, layer: int, message: str) -> LoadReport:
    """Both the report and a load of the layer name it; returns the report."""
    checkpoint = Checkpoint(path)
    report = audit(checkpoint)
    assert any(message in finding.message for finding in report.errors), report.text()
    assert message in report.text()
    with pytest.raises(CheckpointError) as caught:
        report.require_clean()
    assert message in str(caught.value)
    with pytest.raises(CheckpointError) as caught:
        read_layer(checkpoint, layer)
    assert message in str(caught.value)
    return report


@pytest.mark.parametrize(("config", "make"), FAMILIES)
@pytest.mark.parametrize("layout", ["single", "sharded", "no index"])
def test_clean_checkpoints(
    tmp_path: Path,
    rng: torch.Generator,
    config: Callable[..., dict[str, Any]],
    make: Callable[..., Tensors],
    layout: str,
) -> None:
    tensors = make(rng)
    write(tmp_path, config(), tensors, shards=0 if layout == "single" else 4)
    if layout == "no index":
        (tmp_path / "model.safetensors.index.json").unlink()
    checkpoint = Checkpoint(tmp_path)
    report = audit(checkpoint)
    report.require_clean()
    _require_partition(report, tensors)
    # Bytes consumed = bytes read by loading every layer.
    read: list[int] = []
    for layer in range(checkpoint.family.num_layers):
        read_layer(checkpoint, layer, read.append)
    assert sum(read) == sum(entry.info.nbytes for entry in report.consumed)


def test_glm_counts(tmp_path: Path, rng: torch.Generator) -> None:
    report = audit(Checkpoint(write(tmp_path, glm_config(), glm_tensors(rng))))
    content = report.to_dict()
    assert {what: entry["tensors"] for what, entry in content["consumed"].items()} == {
        "routed experts": 4 * 3 * 3,
        "shared expert": 3,
        "dense MLP": 3,
        "router": 2,
    }
    codes, scales = 32 * 64 // 2, 32 * 64 // 16
    assert content["consumed"]["routed experts"]["bytes"] == 12 * (codes + scales + 4)
    assert {rule: entry["tensors"] for rule, entry in content["ignored"].items()} == {
        "mtp": 2,
        "input_scale": 12,
        "kv_scale": 2,
        "vision_tower": 1,
        "attention": 2,
        "hyper_connection": 2,
        "norm": 5,
        "embedding": 2,
    }
    assert content["formats"] == {
        "0": {"dense MLP": "BF16"},
        "1": {"routed experts": "ModelOpt NVFP4", "shared expert": "BF16"},
    }
    assert json.loads(json.dumps(content)) == content
    for word in ("ModelOpt NVFP4", "input_scale", "static activation scale", "routed experts"):
        assert word in report.text()


def test_deepseek_counts(tmp_path: Path, rng: torch.Generator) -> None:
    content = audit(Checkpoint(write(tmp_path, deepseek_config(), deepseek_tensors(rng)))).to_dict()
    assert {what: entry["tensors"] for what, entry in content["consumed"].items()} == {
        "routed experts": 2 * 4 * 3 * 2,
        "shared expert": 2 * 3,
        "router": 4,
    }
    assert content["formats"]["0"]["routed experts"] == "DeepSeek MXFP4"


@pytest.mark.parametrize("leaf", ["weight", "weight_scale", "weight_scale_2"])
def test_expert_tensor_deleted(tmp_path: Path, rng: torch.Generator, leaf: str) -> None:
    tensors = glm_tensors(rng)
    name = f"{MOE}.experts.2.up_proj.{leaf}"
    del tensors[name]
    path = write(tmp_path, glm_config(), tensors)
    report = _refused(path, 1, f"{path}: {name} is missing (ModelOpt NVFP4 needs ")
    _require_partition(report, tensors)
    # The other two tensors of the projection are of no use, so they are not consumed either.
    errors = report.to_dict()["errors"]
    assert (errors["missing"], errors["tensors"]) == (1, 2)
    assert sum("belongs to an incomplete ModelOpt" in text for text in errors["messages"]) == 2


@pytest.mark.parametrize("keep_input_scale", [True, False])
def test_whole_expert_deleted(tmp_path: Path, rng: torch.Generator, keep_input_scale: bool) -> None:
    tensors = glm_tensors(rng)
    base = f"{MOE}.experts.3.down_proj"
    for leaf in ("weight", "weight_scale", "weight_scale_2"):
        del tensors[f"{base}.{leaf}"]
    if not keep_input_scale:
        del tensors[f"{base}.input_scale"]
    path = write(tmp_path, glm_config(), tensors)
    report = _refused(path, 1, f"{base}.weight is missing, and all of {base}")
    _require_partition(report, tensors)


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        (0, "layers.0.ffn.gate.tid2eid"),
        (1, "layers.1.ffn.gate.bias"),
        (1, "layers.1.ffn.gate.weight"),
        (0, "layers.0.ffn.shared_experts.w3.weight"),
        (1, "layers.1.ffn.experts.0.w1.scale"),
        (1, "layers.1.ffn.experts.0.w1.weight"),
    ],
)
def test_deepseek_tensor_deleted(
    tmp_path: Path, rng: torch.Generator, layer: int, name: str
) -> None:
    tensors = deepseek_tensors(rng)
    del tensors[name]
    report = _refused(write(tmp_path, deepseek_config(), tensors), layer, f"{name} is missing")
    _require_partition(report, tensors)


@pytest.mark.parametrize(
    "name",
    [
        f"{MOE}.experts.4.gate_proj.weight",
        f"{MOE}.experts.0.gate_proj.bias",
        f"{MOE}.experts.gate_up_proj",
        f"{MOE}.gate.e_bias",
    ],
)
def test_extra_tensor_in_a_block(tmp_path: Path, rng: torch.Generator, name: str) -> None:
    tensors = glm_tensors(rng)
    tensors[name] = torch.zeros(2, 2)
    path = write(tmp_path, glm_config(), tensors)
    report = _refused(path, 1, f"model.safetensors: {name} (F32 [2, 2]) is unexpected")
    _require_partition(report, tensors)


def test_extra_tensor_outside_the_blocks(tmp_path: Path, rng: torch.Generator) -> None:
    tensors = glm_tensors(rng)
    tensors["model.language_model.layers.7.mlp.gate.weight"] = torch.zeros(2)
    report = audit(Checkpoint(write(tmp_path, glm_config(), tensors)))
    assert [finding.tensor for finding in report.errors] == [
        "model.language_model.layers.7.mlp.gate.weight"
    ]
    _require_partition(report, tensors)


@pytest.mark.parametrize(
    ("name", "wrong", "expected"),
    [
        ("experts.1.up_proj.weight", torch.zeros(32, 16).byte(), "U8 [32, 32]"),
        ("experts.1.up_proj.weight_scale", torch.zeros(32, 2), "F8_E4M3 [32, 4]"),
        ("experts.1.up_proj.weight_scale_2", torch.zeros(2), "F32 [] or [1]"),
        ("experts.1.up_proj.weight_scale_2", torch.zeros(()).half(), "F32 [] or [1]"),
        ("gate.weight", torch.zeros(4, 64).half(), "BF16 or F32 [4, 64]"),
        ("gate.weight", torch.zeros(5, 64), "BF16 or F32 [4, 64]"),
        ("gate.e_score_correction_bias", torch.zeros(4, 1), "F32 or BF16 [4]"),
        ("shared_experts.down_proj.weight", torch.zeros(32, 64).bfloat16(), "BF16 [64, 32]"),
    ],
)
def test_wrong_shape_or_dtype(
    tmp_path: Path, rng: torch.Generator, name: str, wrong: Tensor, expected: str
) -> None:
    tensors = glm_tensors(rng)
    tensors[f"{MOE}.{name}"] = wrong
    path = write(tmp_path, glm_config(), tensors)
    report = _refused(path, 1, f"model.safetensors: {MOE}.{name} (")
    assert any(f"{list(wrong.shape)}): expected {expected}" in e.message for e in report.errors)
    _require_partition(report, tensors)


def test_wrong_hash_table(tmp_path: Path, rng: torch.Generator) -> None:
    tensors = deepseek_tensors(rng)
    name = "layers.0.ffn.gate.tid2eid"
    tensors[name] = tensors[name].int()
    path = write(tmp_path, deepseek_config(), tensors)
    _refused(path, 0, f"{name} (I32 [10, 2]): expected I64 [10, 2]")


def test_a_width_that_the_blocks_do_not_divide(tmp_path: Path, rng: torch.Generator) -> None:
    tensors = {
        name: tensor for name, tensor in glm_tensors(rng).items() if ".layers.0.mlp" not in name
    }
    for word, size in (("gate_proj", (40, 64)), ("up_proj", (40, 64)), ("down_proj", (64, 40))):
        base = f"model.language_model.layers.0.mlp.{word}"
        tensors |= modelopt(rng, base, *size, torch.tensor(1.0))
    path = write(tmp_path, glm_config(intermediate_size=40), tensors)
    _refused(path, 0, "k is 40, but ModelOpt NVFP4 stores multiples of 16")


def test_one_expert_in_another_layout(tmp_path: Path, rng: torch.Generator) -> None:
    tensors = glm_tensors(rng)
    base = f"{MOE}.experts.2.gate_proj"
    for leaf in ("weight", "weight_scale", "weight_scale_2"):
        del tensors[f"{base}.{leaf}"]
    tensors |= native(rng, base, 32, 64)
    path = write(tmp_path, glm_config(), tensors)
    report = _refused(path, 1, "is DeepSeek MXFP4, but ")
    _require_partition(report, tensors)


def test_bf16_bias_is_noted(tmp_path: Path, rng: torch.Generator) -> None:
    tensors = glm_tensors(rng)
    name = f"{MOE}.gate.e_score_correction_bias"
    tensors[name] = tensors[name].bfloat16()
    report = audit(Checkpoint(write(tmp_path, glm_config(), tensors)))
    report.require_clean()
    assert len(report.notes) == 1 and name in report.notes[0] and "upcast" in report.notes[0]
    assert report.notes[0] in report.text()


def test_long_lists_of_errors_are_cut(tmp_path: Path, rng: torch.Generator) -> None:
    tensors = glm_tensors(rng) | {f"stray.{i}": torch.zeros(1) for i in range(50)}
    report = audit(Checkpoint(write(tmp_path, glm_config(), tensors)))
    assert len(report.errors) == 50
    assert "and 30 more" in report.text()
    with pytest.raises(CheckpointError, match="50 errors(?s:.*)and 30 more"):
        report.require_clean()


def test_a_load_raises_the_first_finding_and_counts_the_others(
    tmp_path: Path, rng: torch.Generator
) -> None:
    tensors = glm_tensors(rng)
    for expert in (0, 2, 3):
        del tensors[f"{MOE}.experts.{expert}.up_proj.weight_scale"]
    checkpoint = Checkpoint(write(tmp_path, glm_config(), tensors))
    said = r"experts\.0\.up_proj\.weight_scale is missing .*\(and (\d+) more\)$"
    with pytest.raises(CheckpointError, match=said) as refused:
        read_layer(checkpoint, 1)
    found = len(audit(checkpoint).errors)
    assert str(refused.value).endswith(f"(and {found - 1} more)") and found > 3
