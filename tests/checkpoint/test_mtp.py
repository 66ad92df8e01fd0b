"""Multi-token prediction layers are the layers after the last one; a model leaves them alone."""

from pathlib import Path

import pytest
import torch

from checkpoint_layouts import (
    DEEPSEEK_WORDS,
    GLM_SIZES,
    GLM_WORDS,
    decode_plain,
    decoded,
    deepseek_mtp_tensors,
    glm_mtp_tensors,
    projections,
    same_bytes,
    truth,
)
from checkpoint_maker import (
    Tensors,
    decode_modelopt,
    decode_native,
    deepseek_config,
    glm_config,
    glm_tensors,
    modelopt,
    plain,
    write,
)
from exactmoe.checkpoint import Checkpoint, audit, read_moe
from exactmoe.errors import CheckpointError, ConfigError
from exactmoe.formats import dequantize
from exactmoe.layer import MoELayer
from exactmoe.load import load_layer

BLOCK = "model.language_model.layers.2.mlp"


def _glm(rng: torch.Generator, stored: str) -> Tensors:
    def make(base: str, projection: str, expert: int) -> Tensors:
        if stored == "BF16":
            return plain(rng, base, *GLM_SIZES[projection])
        made = modelopt(rng, base, *GLM_SIZES[projection], torch.tensor(0.01 * (expert + 1)))
        return made | {f"{base}.input_scale": torch.tensor(1.0)}

    return glm_mtp_tensors(rng, make)


@pytest.mark.parametrize("stored", ["BF16", "ModelOpt NVFP4"])
def test_glm(tmp_path: Path, rng: torch.Generator, stored: str) -> None:
    """Layer 1 is NVFP4 in both (field fault A27: the draft layer has a format of its own)."""
    tensors = _glm(rng, stored)
    path = write(tmp_path, glm_config(), tensors)
    weights = read_moe(Checkpoint(path), 2)
    decode = decode_plain if stored == "BF16" else decode_modelopt
    values = decoded(tensors, BLOCK, GLM_WORDS, decode)
    for name, weight in projections(weights).items():
        assert weight.format == ("bf16" if stored == "BF16" else "nvfp4")
        assert same_bytes(dequantize(weight), values[name])
    assert same_bytes(weights.router.weight, tensors[f"{BLOCK}.gate.weight"])
    assert weights.shared is not None
    assert same_bytes(weights.shared.up.codes[0], tensors[f"{BLOCK}.shared_experts.up_proj.weight"])
    layer = load_layer(path, 2)
    assert isinstance(layer, MoELayer) and layer.config.swiglu_limit == 10.0
    x = torch.randn(2, 64, generator=rng).bfloat16()
    slots, factors = torch.tensor([[3, 0], [1, 2]]), torch.rand(2, 2, generator=rng)
    expected = truth(x, slots, factors, values, 10.0)
    y = layer.experts(x, slots, factors)
    assert (y.double() - expected).norm() < 2**-7 * expected.norm()


def test_a_model_leaves_it_to_the_named_rule(tmp_path: Path, rng: torch.Generator) -> None:
    tensors = _glm(rng, "BF16")
    path = write(tmp_path, glm_config(), tensors)
    checkpoint = Checkpoint(path)
    assert checkpoint.family.num_layers == 2
    report = audit(checkpoint)
    report.require_clean()
    inside = [name for name in tensors if ".layers.2." in name]
    ignored = [entry.info.name for entry in report.ignored if entry.rule.name == "mtp"]
    assert sorted(ignored) == sorted(inside)


@pytest.mark.parametrize(
    "name", ["experts.3.up_proj.weight_scale", "gate.weight", "shared_experts.up_proj.weight"]
)
def test_glm_tensor_deleted(tmp_path: Path, rng: torch.Generator, name: str) -> None:
    tensors = _glm(rng, "ModelOpt NVFP4")
    del tensors[f"{BLOCK}.{name}"]
    path = write(tmp_path, glm_config(), tensors)
    with pytest.raises(CheckpointError, match=f"{BLOCK}.{name} is missing"):
        load_layer(path, 2)


def test_extra_tensor(tmp_path: Path, rng: torch.Generator) -> None:
    """The rule that ignores the layer in a model does not hide what a load of it must know."""
    tensors = _glm(rng, "ModelOpt NVFP4")
    tensors[f"{BLOCK}.experts.0.up_proj.bias"] = torch.zeros(32)
    path = write(tmp_path, glm_config(), tensors)
    audit(Checkpoint(path)).require_clean()
    with pytest.raises(CheckpointError, match=r"experts\.0\.up_proj\.bias .* is unexpected"):
        load_layer(path, 2)


def test_layers_that_the_checkpoint_does_not_have(tmp_path: Path, rng: torch.Generator) -> None:
    tensors = _glm(rng, "BF16")
    path = write(tmp_path / "one", glm_config(num_nextn_predict_layers=3), tensors)
    allowed = r"layer is 3; allowed: 0 to 2 \(multi-token prediction from 2\)"
    with pytest.raises(ConfigError, match=allowed):
        load_layer(path, 3)
    with pytest.raises(ConfigError, match="layer is -1"):
        load_layer(path, -1)
    tensors = {name: t for name, t in glm_tensors(rng).items() if ".layers.2." not in name}
    path = write(tmp_path / "none", glm_config(), tensors)
    with pytest.raises(ConfigError, match=r"layer is 2; allowed: 0 to 1$"):
        load_layer(path, 2)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_deepseek(tmp_path: Path, rng: torch.Generator, prefix: str) -> None:
    """Two blocks, although the config says 1: the tensors decide."""
    tensors = deepseek_mtp_tensors(rng, 2, prefix)
    config = deepseek_config(num_nextn_predict_layers=1)
    path = write(tmp_path, config, tensors)
    audit(Checkpoint(path)).require_clean()
    for number in (0, 1):
        block = f"{prefix}mtp.{number}.ffn"
        weights = read_moe(Checkpoint(path), 2 + number)
        values = decoded(tensors, block, DEEPSEEK_WORDS, decode_native)
        for name, weight in projections(weights).items():
            assert weight.format == "mxfp4" and same_bytes(dequantize(weight), values[name])
        assert weights.router.table is None
        assert isinstance(weights.router.bias, torch.Tensor)
        assert same_bytes(weights.router.bias, tensors[f"{block}.gate.bias"])
    layer = load_layer(path, 3)
    assert isinstance(layer, MoELayer) and layer.numerics.activation == "a8"
    with pytest.raises(ConfigError, match="layer is 4; allowed: 0 to 3"):
        load_layer(path, 4)
