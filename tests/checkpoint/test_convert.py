"""convert_checkpoint: the same codes in the other dialect, and back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file, save_file

from checkpoint_layouts import same_bytes
from exactmoe.checkpoint import Checkpoint, audit, read_layer
from exactmoe.checkpoint.rewrite import QuantizeRequest, convert_checkpoint, quantize_checkpoint
from exactmoe.errors import ConfigError, Unsupported
from synthetic_checkpoints import Synthetic, write_synthetic

BASE = "model.language_model.layers.1.mlp.experts.0.gate_proj"


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def with_scale(folder: Path, name: str, value: float) -> None:
    with_tensor(folder, name, torch.tensor(value))


def with_tensor(folder: Path, name: str, tensor: torch.Tensor) -> None:
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors[name] = tensor
    save_file(tensors, file)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"][name] = file.name
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def quantization(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return found


def test_there_and_back(tmp_path: Path) -> None:
    source = write_synthetic(tmp_path / "in", Synthetic(shards=1))
    with_scale(source, f"{BASE}.weight_scale_2", 0.75)  # 1 / (1 / 0.75) is 0.75 in float32
    with_scale(source, f"{BASE}.input_scale", 0.5)
    rows, _ = convert_checkpoint(source, tmp_path / "ct", "compressed-tensors")
    before, middle = tensors_of(source), tensors_of(tmp_path / "ct")
    assert len(rows) == 12 and all(row.exact for row in rows)
    assert same_bytes(middle[f"{BASE}.weight_packed"], before[f"{BASE}.weight"])
    assert same_bytes(middle[f"{BASE}.weight_scale"], before[f"{BASE}.weight_scale"])
    assert middle[f"{BASE}.weight_global_scale"].tolist() == [float(1 / torch.tensor(0.75))]
    assert middle[f"{BASE}.input_global_scale"].tolist() == [2.0]
    assert f"{BASE}.weight" not in middle and f"{BASE}.input_scale" not in middle
    checkpoint = Checkpoint(tmp_path / "ct")
    audit(checkpoint).require_clean()
    read_layer(checkpoint, 1)
    convert_checkpoint(tmp_path / "ct", tmp_path / "mo", "modelopt")
    after = tensors_of(tmp_path / "mo")
    assert after.keys() == before.keys()
    assert all(same_bytes(after[name], before[name]) for name in before)


def test_a_scale_that_does_not_come_back(tmp_path: Path) -> None:
    source = write_synthetic(tmp_path / "in", Synthetic(shards=1))
    value = next(
        v
        for v in (2 - k * 2.0**-23 for k in range(1, 1000))
        if float(1 / (1 / torch.tensor(v))) != v
    )
    with_scale(source, f"{BASE}.weight_scale_2", value)
    with pytest.raises(ConfigError, match=f"{BASE}: the scale {value} does not come back"):
        convert_checkpoint(source, tmp_path / "out", "compressed-tensors")
    rows, _ = convert_checkpoint(source, tmp_path / "out", "compressed-tensors", lossy=True)
    assert [row.name for row in rows if not row.exact] == [BASE]


@pytest.mark.parametrize("value", [2.0**-127, 2.0**127])
@pytest.mark.parametrize("word", ["weight_scale_2", "input_scale"])
def test_a_reciprocal_that_is_no_scale(tmp_path: Path, word: str, value: float) -> None:
    """2^127 does come back from 2^-127, but an engine that flushes 2^-127 divides by zero."""
    source = write_synthetic(tmp_path / "in", Synthetic(shards=1))
    with_scale(source, f"{BASE}.{word}", value)
    with pytest.raises(
        Unsupported, match=rf"{BASE}.*the scale is .*; allowed: positive, finite and normal"
    ):
        convert_checkpoint(source, tmp_path / "out", "compressed-tensors", lossy=True)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("value", [0.0, -0.5, float("inf"), float("nan")])
def test_an_input_scale_that_is_no_positive_number(tmp_path: Path, value: float) -> None:
    source = write_synthetic(tmp_path / "in", Synthetic(shards=1))
    with_scale(source, f"{BASE}.input_scale", value)
    said = f"{BASE}.input_global_scale: the scale is {value}; allowed: positive"
    with pytest.raises(Unsupported, match=said):
        convert_checkpoint(source, tmp_path / "out", "compressed-tensors", lossy=True)


@pytest.mark.parametrize(
    ("tensor", "shown"),
    [
        (torch.ones(2), r"F32 \[2\]"),
        (torch.ones(1, 1), r"F32 \[1, 1\]"),
        (torch.ones(()).bfloat16(), "BF16"),
    ],
)
def test_an_input_scale_of_another_kind(tmp_path: Path, tensor: torch.Tensor, shown: str) -> None:
    source = write_synthetic(tmp_path / "in", Synthetic(shards=1))
    with_tensor(source, f"{BASE}.input_scale", tensor)
    with pytest.raises(Unsupported, match=rf"{BASE}.input_scale .*{shown}.* is no scale of one"):
        convert_checkpoint(source, tmp_path / "out", "compressed-tensors")
    assert not (tmp_path / "out").exists()


def test_two_input_scales_of_one_projection(tmp_path: Path) -> None:
    source = write_synthetic(tmp_path / "in", Synthetic(shards=1))
    for word in ("input_scale", "input_global_scale"):
        with_scale(source, f"{BASE}.{word}", 0.5)
    with pytest.raises(Unsupported, match=f"{BASE}.input_.* and {BASE}.input_.*; allowed: one"):
        convert_checkpoint(source, tmp_path / "out", "compressed-tensors")


@pytest.mark.parametrize(("dialect", "value"), [("modelopt", 0.25), ("compressed-tensors", 4.0)])
def test_a_stack_has_one_input_scale(tmp_path: Path, dialect: str, value: float) -> None:
    """ModelOpt's own: its reciprocal goes to compressed-tensors only."""
    source = write_synthetic(tmp_path / "in", Synthetic(dialect="stacked-nvfp4", shards=1))
    block = BASE.rpartition(".0.")[0]
    with_scale(source, f"{block}.gate_up_proj_input_scale", 0.25)
    convert_checkpoint(source, tmp_path / "out", dialect)
    after = tensors_of(tmp_path / "out")
    found = {name: float(t) for name, t in after.items() if "input" in name}
    word = "input_scale" if dialect == "modelopt" else "input_global_scale"
    words = ("gate_proj", "up_proj")
    assert found == {f"{block}.{e}.{w}.{word}": value for e in range(4) for w in words}


def test_stacked_experts_get_their_own_tensors(tmp_path: Path) -> None:
    source = write_synthetic(tmp_path / "in", Synthetic(dialect="stacked-nvfp4"))
    convert_checkpoint(source, tmp_path / "out", "modelopt")
    before, after = tensors_of(source), tensors_of(tmp_path / "out")
    block = BASE.rpartition(".0.")[0]
    assert same_bytes(after[f"{block}.2.up_proj.weight"], before[f"{block}.gate_up_proj"][2, 128:])
    scale = before[f"{block}.gate_up_proj_scale_2"][2, 1]
    assert same_bytes(after[f"{block}.2.up_proj.weight_scale_2"], scale)


def test_what_cannot_be_converted(tmp_path: Path) -> None:
    native = write_synthetic(tmp_path / "mx", Synthetic("deepseek_v4", "deepseek"))
    with pytest.raises(Unsupported, match="is DeepSeek MXFP4; allowed: NVFP4"):
        convert_checkpoint(native, tmp_path / "out", "modelopt")
    plain = write_synthetic(tmp_path / "bf16", Synthetic(dialect="bf16"))
    with pytest.raises(ConfigError, match="has no NVFP4 weight in another dialect than modelopt"):
        convert_checkpoint(plain, tmp_path / "out", "modelopt")
    with pytest.raises(
        ConfigError, match="dialect is 'gguf'; allowed: modelopt, compressed-tensors"
    ):
        convert_checkpoint(plain, tmp_path / "out", "gguf")


def test_configs(tmp_path: Path) -> None:
    """compressed-tensors reads its own; ModelOpt's says whether activations have scales."""
    source = write_synthetic(tmp_path / "in", Synthetic(shards=1))
    convert_checkpoint(source, tmp_path / "ct", "compressed-tensors")
    made = quantization(tmp_path / "ct")
    parsed = QuantizationConfig.model_validate(made)
    weights = parsed.config_groups["group_0"].weights
    assert (weights.num_bits, weights.group_size, str(weights.strategy)) == (
        4,
        16,
        "tensor_group",
    )
    assert parsed.format == "nvfp4-pack-quantized"
    assert parsed.config_groups["group_0"].input_activations is None
    block = "model.language_model.layers.1.mlp"
    assert f"{block}.gate" in made["ignore"] and f"{block}.experts*" not in made["ignore"]
    with_scale(source, f"{BASE}.input_scale", 0.5)
    convert_checkpoint(source, tmp_path / "w4a4", "compressed-tensors")
    assert quantization(tmp_path / "w4a4")["config_groups"]["group_0"]["input_activations"]
    convert_checkpoint(tmp_path / "w4a4", tmp_path / "m4", "modelopt")
    convert_checkpoint(tmp_path / "ct", tmp_path / "m16", "modelopt")
    algorithms = [quantization(tmp_path / name)["quant_algo"] for name in ("m4", "m16")]
    assert algorithms == ["NVFP4", "W4A16_NVFP4"]


def test_the_empty_text_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Path("") is the current folder, which may be empty."""
    source = write_synthetic(tmp_path / "in", Synthetic(shards=1))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ConfigError, match="out is '', the empty text; allowed: a folder"):
        convert_checkpoint(source, "", "compressed-tensors")
    with pytest.raises(ConfigError, match="out is '', the empty text; allowed: a folder"):
        quantize_checkpoint(source, "", QuantizeRequest("mxfp4", lossy=True))
    assert not list((tmp_path / "here").iterdir())
