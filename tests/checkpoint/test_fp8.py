"""FP8 with a scale per 128 x 128 block, float32 (`weight_scale_inv`) or E8M0 (`scale`)."""

from pathlib import Path

import pytest
import torch

from checkpoint_layouts import (
    DEEPSEEK_WORDS,
    GLM_WORDS,
    fp8,
    hybrid_config,
    hybrid_tensors,
    projections,
    same_bytes,
    truth,
)
from checkpoint_maker import Tensors, glm_config, glm_tensors, write
from exactmoe.checkpoint import Checkpoint, audit, read_dense, read_layer, read_moe
from exactmoe.errors import CheckpointError
from exactmoe.formats import dequantize
from exactmoe.layer import DenseMLP
from exactmoe.load import load_layer

SUFFIXES = ("weight_scale_inv", "scale", "weight_scale")
DENSE = "model.language_model.layers.0.mlp"
SHARED = "layers.1.ffn.shared_experts"


def _dense(rng: torch.Generator, suffix: str, inner: int) -> Tensors:
    """glm_tensors() with an FP8 dense layer of width `inner`, the last blocks partly filled."""
    tensors = {n: t for n, t in glm_tensors(rng).items() if not n.startswith(DENSE)}
    for word in ("gate_proj", "up_proj"):
        tensors |= fp8(rng, f"{DENSE}.{word}", inner, 64, suffix)
    return tensors | fp8(rng, f"{DENSE}.down_proj", 64, inner, suffix)


def _decode(tensors: Tensors, base: str, suffix: str) -> torch.Tensor:
    """True values float64 [N, K], element by element."""
    codes, scales = tensors[f"{base}.weight"].double(), tensors[f"{base}.{suffix}"].double()
    values = torch.empty_like(codes)
    for row in range(codes.shape[0]):
        for block in range(scales.shape[1]):
            columns = slice(128 * block, 128 * (block + 1))
            values[row, columns] = codes[row, columns] * scales[row // 128, block]
    return values


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("inner", [48, 128, 208, 384])
def test_dense_layer(tmp_path: Path, rng: torch.Generator, suffix: str, inner: int) -> None:
    tensors = _dense(rng, suffix, inner)
    path = write(tmp_path, glm_config(intermediate_size=inner), tensors)
    report = audit(Checkpoint(path))
    report.require_clean()
    assert report.formats[0] == {"dense MLP": f"FP8 128x128 with {suffix}"}
    values = {}
    for name, weight in projections(read_dense(Checkpoint(path), 0)).items():
        base = f"{DENSE}.{GLM_WORDS[name]}"
        assert weight.format == "fp8" and weight.scales is not None
        assert same_bytes(weight.codes[0], tensors[f"{base}.weight"])
        assert same_bytes(weight.scales[0], tensors[f"{base}.{suffix}"].float())
        values[name] = _decode(tensors, base, suffix)[None]
        assert same_bytes(dequantize(weight), values[name])
    layer = load_layer(path, 0)
    assert isinstance(layer, DenseMLP)
    x = torch.randn(3, 64, generator=rng).bfloat16()
    slots, ones = torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    expected = truth(x, slots, ones, values, 10.0)
    assert (layer(x).double() - expected).norm() < 2**-7 * expected.norm()


def test_nvidia_deepseek_with_its_shared_experts(tmp_path: Path, rng: torch.Generator) -> None:
    """Field fault A27: routed NVFP4 beside shared FP8 with E8M0 scales, as published."""
    tensors = hybrid_tensors(rng)
    for word in DEEPSEEK_WORDS.values():
        del tensors[f"{SHARED}.{word}.weight"]
        tensors |= fp8(rng, f"{SHARED}.{word}", 128, 128, "scale")
    path = write(tmp_path, hybrid_config(), tensors)
    report = audit(Checkpoint(path))
    report.require_clean()
    assert report.formats[1] == {
        "routed experts": "ModelOpt NVFP4",
        "shared expert": "FP8 128x128 with scale",
    }
    weights = read_moe(Checkpoint(path), 1)
    assert weights.shared is not None and weights.bank.formats == ("nvfp4",) * 3
    for name, weight in projections(weights.shared).items():
        expected = _decode(tensors, f"{SHARED}.{DEEPSEEK_WORDS[name]}", "scale")
        assert same_bytes(dequantize(weight)[0], expected)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_missing_and_malformed(tmp_path: Path, rng: torch.Generator, suffix: str) -> None:
    config = glm_config(intermediate_size=208)
    name = f"{DENSE}.down_proj.{suffix}"
    for number, shape in enumerate([(1, 1), (2, 1), (2,)]):
        tensors = _dense(rng, suffix, 208)
        tensors[name] = torch.ones(shape).to(tensors[name].dtype)
        checkpoint = Checkpoint(write(tmp_path / str(number), config, tensors))
        with pytest.raises(CheckpointError, match=rf"{name} .*: expected [\w ]+ \[1, 2\]"):
            read_layer(checkpoint, 0)
    tensors = _dense(rng, suffix, 208)
    del tensors[f"{DENSE}.up_proj.{suffix}"]
    checkpoint = Checkpoint(write(tmp_path / "no scales", config, tensors))
    with pytest.raises(CheckpointError, match=r"unknown layout of .*up_proj: .*weight F8_E4M3"):
        read_layer(checkpoint, 0)
    tensors = _dense(rng, suffix, 208)
    del tensors[f"{DENSE}.up_proj.weight"]
    checkpoint = Checkpoint(write(tmp_path / "no codes", config, tensors))
    with pytest.raises(CheckpointError, match=rf"{DENSE}\.up_proj\.weight is missing"):
        read_layer(checkpoint, 0)


@pytest.mark.parametrize(
    ("leaf", "value", "message"),
    [
        ("weight_scale_inv", 0.0, "block scale 0.0 at expert 0, row 0, block 1"),
        ("weight_scale_inv", float("inf"), "block scale inf at expert 0, row 0, block 1"),
        ("scale", 255, "block scale nan at expert 0, row 0, block 1"),
        ("weight", 0x7F, "code 0x7F .NaN. at expert 0, row 3, block 1, column 130"),
    ],
)
def test_refused_values_name_their_tensor(
    tmp_path: Path, rng: torch.Generator, leaf: str, value: float, message: str
) -> None:
    tensors = _dense(rng, "weight_scale_inv" if leaf == "weight" else leaf, 208)
    name = f"{DENSE}.down_proj.{leaf}"
    if leaf == "weight_scale_inv":
        tensors[name][0, 1] = value
    else:
        raw = tensors[name].view(torch.uint8)
        raw[(0, 1) if leaf == "scale" else (3, 130)] = int(value)
    checkpoint = Checkpoint(write(tmp_path, glm_config(intermediate_size=208), tensors))
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: {name}: {message}"):
        read_layer(checkpoint, 0)
