"""Further layouts: the bytes are kept, the values are right, and the layer runs with them."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from checkpoint_layouts import (
    DEEPSEEK_WORDS,
    GLM_BLOCK,
    GLM_SIZES,
    GLM_WORDS,
    compressed,
    compressed_from,
    compressed_tensors,
    decode_compressed,
    decode_plain,
    decoded,
    glm_bf16_tensors,
    hybrid_config,
    hybrid_tensors,
    projections,
    same_bytes,
    truth,
    with_experts,
)
from checkpoint_maker import (
    Tensors,
    decode_modelopt,
    glm_config,
    glm_tensors,
    modelopt,
    native,
    write,
)
from exactmoe.checkpoint import Checkpoint, audit, read_dense, read_moe
from exactmoe.errors import CheckpointError
from exactmoe.formats import dequantize
from exactmoe.layer import MoELayer
from exactmoe.load import load_layer

IDS = torch.tensor([[0, 3], [2, 1], [3, 2]])


def _run(layer: object, rng: torch.Generator, hidden: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, weights and the routed experts' y for IDS."""
    assert isinstance(layer, MoELayer)
    x = torch.randn(3, hidden, generator=rng).bfloat16()
    weights = torch.rand(3, 2, generator=rng) + 0.1
    return x, weights, layer.experts(x, IDS, weights)


@pytest.mark.parametrize("shards", [0, 3])
def test_compressed_tensors_bytes_and_values(
    tmp_path: Path, rng: torch.Generator, shards: int
) -> None:
    tensors = compressed_tensors(rng)
    weights = read_moe(Checkpoint(write(tmp_path, glm_config(), tensors, shards)), 1)
    for name, weight in projections(weights).items():
        assert (weight.format, weight.global_scale_op) == ("nvfp4", "divide")
        assert weight.scales is not None and weight.global_scale is not None
        values = dequantize(weight)
        for expert in range(4):
            base = f"{GLM_BLOCK}.experts.{expert}.{GLM_WORDS[name]}"
            assert same_bytes(weight.codes[expert], tensors[f"{base}.weight_packed"])
            assert same_bytes(weight.scales[expert], tensors[f"{base}.weight_scale"])
            divisor = tensors[f"{base}.weight_global_scale"].reshape(())
            assert same_bytes(weight.global_scale[expert], divisor)
            assert same_bytes(values[expert], decode_compressed(tensors, base))


def test_compressed_tensors_layer_runs(tmp_path: Path, rng: torch.Generator) -> None:
    tensors = compressed_tensors(rng)
    layer = load_layer(write(tmp_path, glm_config(), tensors), 1)
    x, weights, y = _run(layer, rng, 64)
    values = decoded(tensors, GLM_BLOCK, GLM_WORDS, decode_compressed)
    expected = truth(x, IDS, weights, values, 10.0)
    assert (y.double() - expected).norm() < 2**-7 * expected.norm()


def test_compressed_tensors_experts_are_as_large_as_the_weights(
    tmp_path: Path, rng: torch.Generator
) -> None:
    """transformers drops the divisor without a word and has them 35,000 times too large."""
    tensors = glm_bf16_tensors(rng)
    values = decoded(tensors, GLM_BLOCK, GLM_WORDS, decode_plain)
    for name in values:  # amax about 0.07, as in a trained model
        values[name] = (values[name] / 50).bfloat16().double()

    def make(base: str, projection: str, expert: int) -> Tensors:
        return compressed_from(base, values[projection][expert])

    tensors = with_experts(tensors, GLM_BLOCK, GLM_WORDS, make)
    divisor = tensors[f"{GLM_BLOCK}.experts.0.up_proj.weight_global_scale"]
    assert float(divisor) > 20_000  # what a loader that drops it would be wrong by
    path = write(tmp_path, glm_config(), tensors)
    for name, weight in projections(read_moe(Checkpoint(path), 1)).items():
        loaded = dequantize(weight)
        for expert in range(4):
            magnitude = loaded[expert].abs().mean() / values[name][expert].abs().mean()
            assert 0.97 < magnitude < 1.03
        assert (loaded - values[name]).norm() < 0.12 * values[name].norm()
    x, weights, y = _run(load_layer(path, 1), rng, 64)
    expected = truth(x, IDS, weights, values, 10.0)
    assert 0.8 < y.double().norm() / expected.norm() < 1.25


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a2_multiplier_and_divisor_of_one_layer(
    tmp_path: Path, rng: torch.Generator, shape: tuple[int, ...]
) -> None:
    """Field fault A2: the same layer with x 2^-10 and with / 2^10 has equal bits."""
    multiplied = glm_tensors(rng)
    divided = dict(multiplied)
    for name in [name for name in multiplied if name.endswith(".weight_scale_2")]:
        base = name.removesuffix(".weight_scale_2")
        multiplied[name] = torch.full(shape, 2.0**-10)
        del divided[name]
        divided[f"{base}.weight_packed"] = divided.pop(f"{base}.weight")
        divided[f"{base}.weight_global_scale"] = torch.full(shape, 2.0**10)
    first = load_layer(write(tmp_path / "m", glm_config(), multiplied), 1)
    second = load_layer(write(tmp_path / "c", glm_config(), divided), 1)
    x = torch.randn(5, 64, generator=rng).bfloat16()
    assert torch.count_nonzero(first(x)) and same_bytes(first(x), second(x))
    values = decoded(divided, GLM_BLOCK, GLM_WORDS, decode_compressed)
    x, weights, y = _run(second, rng, 64)
    expected = truth(x, IDS, weights, values, 10.0)
    assert (y.double() - expected).norm() < 2**-7 * expected.norm()


def test_a2_the_divisor_is_not_optional(tmp_path: Path, rng: torch.Generator) -> None:
    tensors = compressed_tensors(rng)
    name = f"{GLM_BLOCK}.experts.2.up_proj.weight_global_scale"
    del tensors[name]
    with pytest.raises(CheckpointError, match=f"{name} is missing .compressed-tensors NVFP4 needs"):
        load_layer(write(tmp_path, glm_config(), tensors), 1)


def test_a1_every_projection_keeps_its_divisor(tmp_path: Path, rng: torch.Generator) -> None:
    """Field fault A1 for divisors: equal bytes under 2^9 and 2^6, swapped for half the experts."""
    same = compressed(rng, "", 32, 64, torch.ones(1))

    def make(base: str, projection: str, expert: int) -> Tensors:
        if projection == "down":
            return compressed(rng, base, 64, 32, torch.ones(1))
        small = (projection == "gate") == (expert < 2)
        made = {f"{base}{leaf}": tensor for leaf, tensor in same.items()}
        return made | {f"{base}.weight_global_scale": torch.tensor([2.0**9 if small else 2.0**6])}

    tensors = with_experts(glm_tensors(rng), GLM_BLOCK, GLM_WORDS, make)
    bank = read_moe(Checkpoint(write(tmp_path, glm_config(), tensors)), 1).bank
    gate, up = dequantize(bank.gate), dequantize(bank.up)
    assert gate[:2].abs().max() > 0
    assert same_bytes(gate[:2] * 8, up[:2]) and same_bytes(gate[2:], up[2:] * 8)


def test_a3_input_global_scales_are_ignored_by_rule(tmp_path: Path, rng: torch.Generator) -> None:
    """Field fault A3: missing, zero and denormal static activation scales change nothing."""
    tensors = compressed_tensors(rng)
    path = write(tmp_path / "good", glm_config(), tensors)
    good = projections(read_moe(Checkpoint(path), 1))
    report = audit(Checkpoint(path))
    report.require_clean()
    assert report.to_dict()["ignored"]["input_scale"]["tensors"] == 12
    del tensors[f"{GLM_BLOCK}.experts.1.gate_proj.input_global_scale"]
    tensors[f"{GLM_BLOCK}.experts.2.gate_proj.input_global_scale"] = torch.zeros(1)
    tensors[f"{GLM_BLOCK}.experts.3.gate_proj.input_global_scale"] = torch.tensor([1e-40])
    bad = projections(read_moe(Checkpoint(write(tmp_path / "bad", glm_config(), tensors)), 1))
    assert all(same_bytes(dequantize(bad[name]), dequantize(good[name])) for name in good)


@pytest.mark.parametrize(
    ("leaf", "value", "message"),
    [
        ("weight_scale", 0x7F, "block scale 0x7F at expert 3, row 1, block 2"),
        ("weight_scale", 0x80, "block scale 0x80 at expert 3, row 1, block 2"),
        ("weight_global_scale", 0.0, "global scale of expert 3 is 0.0"),
        ("weight_global_scale", float("nan"), "global scale of expert 3 is nan"),
    ],
)
def test_refused_values_name_their_place(
    tmp_path: Path, rng: torch.Generator, leaf: str, value: float, message: str
) -> None:
    tensors = compressed_tensors(rng)
    name = f"{GLM_BLOCK}.experts.3.gate_proj.{leaf}"
    if leaf == "weight_scale":
        tensors[name].view(torch.uint8)[1, 2] = int(value)
    else:
        tensors[name] = torch.tensor([value])
    checkpoint = Checkpoint(write(tmp_path, glm_config(), tensors, shards=3))
    with pytest.raises(
        CheckpointError, match=f"{checkpoint.tensors[name].file}: {name}: {message}"
    ):
        read_moe(checkpoint, 1)


@pytest.mark.parametrize("shards", [0, 3])
def test_nvidia_deepseek_is_decided_by_its_tensors(
    tmp_path: Path, rng: torch.Generator, shards: int
) -> None:
    """The config says fp8; w1, w2 and w3 are NVFP4 with a multiplier, and no `.scale` is left."""
    tensors = hybrid_tensors(rng)
    path = write(tmp_path, hybrid_config(), tensors, shards)
    report = audit(Checkpoint(path))
    report.require_clean()
    assert report.formats[1] == {"routed experts": "ModelOpt NVFP4", "shared expert": "BF16"}
    for layer in (0, 1):
        block = f"layers.{layer}.ffn"
        weights = read_moe(Checkpoint(path), layer)
        values = decoded(tensors, block, DEEPSEEK_WORDS, decode_modelopt)
        for name, weight in projections(weights).items():
            assert (weight.format, weight.global_scale_op) == ("nvfp4", "multiply")
            stored = tensors[f"{block}.experts.3.{DEEPSEEK_WORDS[name]}.weight"]
            assert same_bytes(weight.codes[3], stored)
            assert same_bytes(dequantize(weight), values[name])
        x, slots, y = _run(load_layer(path, layer, numerics="a16"), rng, 128)
        expected = truth(x, IDS, slots, values, 10.0)
        assert (y.double() - expected).norm() < 2**-7 * expected.norm()


def test_a27_every_part_in_a_format_of_its_own(tmp_path: Path, rng: torch.Generator) -> None:
    """Field fault A27: NVFP4 dense layer, shared expert of two dialects, another routed format."""
    tensors = compressed_tensors(rng)
    dense = "model.language_model.layers.0.mlp"
    sizes = {"gate": (48, 64), "up": (48, 64), "down": (64, 48)}
    for name, word in GLM_WORDS.items():
        tensors |= modelopt(rng, f"{dense}.{word}", *sizes[name], torch.tensor(0.25))
    shared = f"{GLM_BLOCK}.shared_experts"
    tensors |= native(rng, f"{shared}.gate_proj", *GLM_SIZES["gate"])
    del tensors[f"{shared}.up_proj.weight"]
    tensors |= compressed(rng, f"{shared}.up_proj", *GLM_SIZES["up"], torch.tensor(300.0))
    config = glm_config()
    # Names and formats in the config are wrong on purpose: nobody asks it.
    config["quantization_config"] = {
        "quant_method": "modelopt",
        "ignore": ["model.layers.*.mlp.shared_experts*", "re:.*layers.0.*"],
    }
    path = write(tmp_path, config, tensors)
    report = audit(Checkpoint(path))
    report.require_clean()
    assert report.formats == {
        0: {"dense MLP": "ModelOpt NVFP4"},
        1: {
            "routed experts": "compressed-tensors NVFP4",
            "shared expert": "DeepSeek MXFP4, compressed-tensors NVFP4, BF16",
        },
    }
    for name, weight in projections(read_dense(Checkpoint(path), 0)).items():
        expected = decode_modelopt(tensors, f"{dense}.{GLM_WORDS[name]}")
        assert same_bytes(dequantize(weight)[0], expected)
    loaded = read_moe(Checkpoint(path), 1).shared
    assert loaded is not None
    assert [w.format for w in projections(loaded).values()] == ["mxfp4", "nvfp4", "bf16"]
    expected = decode_compressed(tensors, f"{shared}.up_proj")
    assert same_bytes(dequantize(loaded.up)[0], expected)
