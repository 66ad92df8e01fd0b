"""The right values out of every dialect, and refusals that name file, tensor and place."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from checkpoint_maker import (
    Tensors,
    decode_modelopt,
    decode_native,
    deepseek_config,
    deepseek_tensors,
    glm_config,
    glm_tensors,
    modelopt,
    native,
    write,
)
from exactmoe.checkpoint import (
    Checkpoint,
    DenseWeights,
    MoEWeights,
    read_dense,
    read_layer,
    read_moe,
)
from exactmoe.errors import CheckpointError, ConfigError, Unsupported
from exactmoe.formats import PackedWeight, dequantize

GLM_MOE = "model.language_model.layers.1.mlp"
GLM_WORDS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
DEEPSEEK_WORDS = {"gate": "w1", "up": "w3", "down": "w2"}


def _same_bytes(found: Tensor, expected: Tensor) -> bool:
    def raw(tensor: Tensor) -> bytes:
        return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

    return found.shape == expected.shape and raw(found) == raw(expected)


def _projections(weights: MoEWeights | DenseWeights) -> dict[str, PackedWeight]:
    owner = weights.bank if isinstance(weights, MoEWeights) else weights
    return {"gate": owner.gate, "up": owner.up, "down": owner.down}


@pytest.mark.parametrize("shards", [0, 3])
def test_modelopt_bytes_and_values(tmp_path: Path, rng: torch.Generator, shards: int) -> None:
    tensors = glm_tensors(rng)
    weights = read_moe(Checkpoint(write(tmp_path, glm_config(), tensors, shards)), 1)
    for name, weight in _projections(weights).items():
        assert (weight.format, weight.global_scale_op) == ("nvfp4", "multiply")
        assert weight.scales is not None and weight.global_scale is not None
        values = dequantize(weight)
        for expert in range(4):
            base = f"{GLM_MOE}.experts.{expert}.{GLM_WORDS[name]}"
            assert _same_bytes(weight.codes[expert], tensors[f"{base}.weight"])
            assert _same_bytes(
                weight.scales[expert], tensors[f"{base}.weight_scale"].view(torch.uint8)
            )
            scale = tensors[f"{base}.weight_scale_2"].reshape(())
            assert _same_bytes(weight.global_scale[expert], scale)
            assert _same_bytes(values[expert], decode_modelopt(tensors, base))


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("shards", [0, 3])
def test_native_bytes_and_values(
    tmp_path: Path, rng: torch.Generator, shards: int, prefix: str
) -> None:
    tensors = deepseek_tensors(rng, prefix)
    checkpoint = Checkpoint(write(tmp_path, deepseek_config(), tensors, shards))
    for layer in (0, 1):
        for name, weight in _projections(read_moe(checkpoint, layer)).items():
            assert weight.format == "mxfp4"
            assert weight.scales is not None and weight.global_scale is None
            values = dequantize(weight)
            for expert in range(4):
                base = f"{prefix}layers.{layer}.ffn.experts.{expert}.{DEEPSEEK_WORDS[name]}"
                assert _same_bytes(
                    weight.codes[expert], tensors[f"{base}.weight"].view(torch.uint8)
                )
                assert _same_bytes(
                    weight.scales[expert], tensors[f"{base}.scale"].view(torch.uint8)
                )
                assert _same_bytes(values[expert], decode_native(tensors, base))


def test_dense_and_shared_parts(tmp_path: Path, rng: torch.Generator) -> None:
    tensors = glm_tensors(rng)
    checkpoint = Checkpoint(write(tmp_path, glm_config(swiglu_limit=7.0), tensors))
    dense, shared = read_dense(checkpoint, 0), read_moe(checkpoint, 1).shared
    assert shared is not None and dense.swiglu_limit == shared.swiglu_limit == 7.0
    for name in ("gate", "up", "down"):
        stored = tensors[f"model.language_model.layers.0.mlp.{GLM_WORDS[name]}.weight"]
        assert _same_bytes(_projections(dense)[name].codes[0], stored)
        stored = tensors[f"{GLM_MOE}.shared_experts.{GLM_WORDS[name]}.weight"]
        assert _same_bytes(_projections(shared)[name].codes[0], stored)
    assert dense.nbytes == 3 * 48 * 64 * 2


def test_dense_layer_in_nvfp4(tmp_path: Path, rng: torch.Generator) -> None:
    tensors = glm_tensors(rng)
    base = "model.language_model.layers.0.mlp.up_proj"
    tensors |= modelopt(rng, base, 48, 64, torch.tensor([0.25]))
    up = read_dense(Checkpoint(write(tmp_path, glm_config(), tensors)), 0).up
    assert (up.format, up.num_experts) == ("nvfp4", 1)
    assert _same_bytes(dequantize(up)[0], decode_modelopt(tensors, base))


def test_routers(tmp_path: Path, rng: torch.Generator) -> None:
    tensors = deepseek_tensors(rng)
    tensors["layers.1.ffn.gate.weight"] = torch.randn(4, 128, generator=rng)
    checkpoint = Checkpoint(write(tmp_path, deepseek_config(), tensors))
    hashed, scored = read_moe(checkpoint, 0).router, read_moe(checkpoint, 1).router
    assert _same_bytes(hashed.weight, tensors["layers.0.ffn.gate.weight"])
    assert _same_bytes(hashed.table, tensors["layers.0.ffn.gate.tid2eid"])
    assert hashed.bias is None and scored.table is None
    assert _same_bytes(scored.weight, tensors["layers.1.ffn.gate.weight"])
    assert _same_bytes(scored.bias, tensors["layers.1.ffn.gate.bias"])
    assert scored.config == checkpoint.family.layer(1).router


def test_bf16_bias_is_upcast_exactly(tmp_path: Path, rng: torch.Generator) -> None:
    tensors = glm_tensors(rng)
    name = f"{GLM_MOE}.gate.e_score_correction_bias"
    tensors[name] = tensors[name].bfloat16()
    bias = read_moe(Checkpoint(write(tmp_path, glm_config(), tensors)), 1).router.bias
    assert isinstance(bias, Tensor) and _same_bytes(bias, tensors[name].float())


def test_a1_gate_and_up_keep_their_own_global_scales(tmp_path: Path, rng: torch.Generator) -> None:
    """Field fault A1: equal bytes under 2^-9 and 2^-6, swapped for half of the experts."""
    tensors = glm_tensors(rng)
    same = modelopt(rng, "", 32, 64, torch.tensor(1.0))
    for expert in range(4):
        pair = (2.0**-9, 2.0**-6) if expert < 2 else (2.0**-6, 2.0**-9)
        for word, scale in zip(("gate_proj", "up_proj"), pair, strict=True):
            base = f"{GLM_MOE}.experts.{expert}.{word}"
            tensors |= {f"{base}{leaf}": tensor for leaf, tensor in same.items()}
            tensors[f"{base}.weight_scale_2"] = torch.tensor(scale)
    bank = read_moe(Checkpoint(write(tmp_path, glm_config(), tensors)), 1).bank
    gate, up = dequantize(bank.gate), dequantize(bank.up)
    assert gate[:2].abs().max() > 0
    assert _same_bytes(gate[:2] * 8, up[:2]) and _same_bytes(gate[2:], up[2:] * 8)


def test_a3_unused_input_scales_do_not_matter(tmp_path: Path, rng: torch.Generator) -> None:
    """Field fault A3: missing, zero and denormal static activation scales are unused."""
    tensors = glm_tensors(rng)
    good = read_moe(Checkpoint(write(tmp_path / "good", glm_config(), tensors)), 1)
    del tensors[f"{GLM_MOE}.experts.1.gate_proj.input_scale"]
    tensors[f"{GLM_MOE}.experts.2.gate_proj.input_scale"] = torch.tensor(0.0)
    tensors[f"{GLM_MOE}.experts.3.gate_proj.input_scale"] = torch.tensor(1e-40)
    bad = read_moe(Checkpoint(write(tmp_path / "bad", glm_config(), tensors)), 1)
    for name, weight in _projections(bad).items():
        assert _same_bytes(dequantize(weight), dequantize(_projections(good)[name]))


def test_a4_e8m0_bytes_at_the_ends(tmp_path: Path, rng: torch.Generator) -> None:
    """Field fault A4: bytes 0 and 254 are values, 0xFF is refused with its place."""
    tensors = deepseek_tensors(rng)
    base = "layers.1.ffn.experts.2.w3"
    codes = torch.zeros(128, 64, dtype=torch.uint8)
    scales = torch.full((128, 4), 127, dtype=torch.uint8)
    # Row 5 is the only one with codes, so that the exponents of the projection span nothing.
    for byte in (0, 254):
        codes[5, :16] = 0x71
        scales[5, 0] = byte
        tensors[f"{base}.weight"] = codes.view(torch.int8)
        tensors[f"{base}.scale"] = scales.view(torch.float8_e8m0fnu)
        path = write(tmp_path / str(byte), deepseek_config(), tensors)
        values = dequantize(read_moe(Checkpoint(path), 1).bank.up)[2]
        assert values[5, :2].tolist() == [0.5 * 2.0 ** (byte - 127), 6.0 * 2.0 ** (byte - 127)]
    scales[7, 3] = 255
    tensors[f"{base}.scale"] = scales.view(torch.float8_e8m0fnu)
    checkpoint = Checkpoint(write(tmp_path / "nan", deepseek_config(), tensors))
    place = rf"model\.safetensors: {base}\.scale: .*0xFF.*expert 2, row 7, block 3"
    with pytest.raises(CheckpointError, match=place):
        read_moe(checkpoint, 1)


@pytest.mark.parametrize(
    ("leaf", "value", "message"),
    [
        ("weight_scale", 0x7F, "block scale 0x7F at expert 3, row 1, block 2"),
        ("weight_scale", 0x81, "block scale 0x81 at expert 3, row 1, block 2"),
        ("weight_scale_2", 0.0, "global scale of expert 3 is 0.0"),
        ("weight_scale_2", float("inf"), "global scale of expert 3 is inf"),
    ],
)
def test_refused_scales_name_their_place(
    tmp_path: Path, rng: torch.Generator, leaf: str, value: float, message: str
) -> None:
    tensors = glm_tensors(rng)
    name = f"{GLM_MOE}.experts.3.gate_proj.{leaf}"
    if leaf == "weight_scale":
        tensors[name].view(torch.uint8)[1, 2] = int(value)
    else:
        tensors[name] = torch.tensor(value)
    checkpoint = Checkpoint(write(tmp_path, glm_config(), tensors, shards=3))
    file = checkpoint.tensors[name].file
    with pytest.raises(CheckpointError, match=f"{file}: {name}: {message}"):
        read_moe(checkpoint, 1)


def test_too_wide_exponents_name_their_place(tmp_path: Path, rng: torch.Generator) -> None:
    tensors = deepseek_tensors(rng)
    base = "layers.1.ffn.experts.1.w2"
    tensors[f"{base}.weight"].view(torch.uint8).fill_(0x11)
    tensors[f"{base}.scale"].view(torch.uint8)[0, 0] = 3
    checkpoint = Checkpoint(write(tmp_path, deepseek_config(), tensors))
    with pytest.raises(Unsupported, match=rf"{base}\.scale: block exponents of expert 1 span"):
        read_moe(checkpoint, 1)


@pytest.mark.parametrize("stored", ["bf16", "nvfp4"])
@pytest.mark.parametrize("ignore", [[], ["model.language_model.layers.*.mlp.shared_experts*"]])
def test_a27_formats_come_from_the_tensors_not_from_the_config(
    tmp_path: Path, rng: torch.Generator, stored: str, ignore: list[str]
) -> None:
    """Field fault A27: mixed precision; whatever the config claims, each part is what it is."""
    tensors = glm_tensors(rng)
    base = f"{GLM_MOE}.shared_experts.down_proj"
    if stored == "nvfp4":
        tensors |= modelopt(rng, base, 64, 32, torch.tensor(0.5))
    config = glm_config()
    config["quantization_config"] = {"quant_method": "modelopt", "ignore": ignore}
    shared = read_moe(Checkpoint(write(tmp_path, config, tensors)), 1).shared
    assert shared is not None and shared.down.format == stored
    truth = tensors[f"{base}.weight"].double()
    if stored == "nvfp4":
        truth = decode_modelopt(tensors, base)
    assert _same_bytes(dequantize(shared.down)[0], truth)
    assert shared.gate.format == "bf16"


def test_hash_table_ids(tmp_path: Path, rng: torch.Generator) -> None:
    tensors = deepseek_tensors(rng)
    table = tensors["layers.0.ffn.gate.tid2eid"]
    table[3] = torch.tensor([2, 2])
    router = read_moe(Checkpoint(write(tmp_path / "repeat", deepseek_config(), tensors)), 0).router
    assert isinstance(router.table, Tensor) and router.table[3].tolist() == [2, 2]
    for bad in (4, -1):
        table[7, 1] = bad
        checkpoint = Checkpoint(write(tmp_path / str(bad), deepseek_config(), tensors))
        place = rf"tid2eid \(layer 0\): table row 7, column 1 is {bad}; allowed: 0 to 3"
        with pytest.raises(CheckpointError, match=place):
            read_moe(checkpoint, 0)


def test_kinds(tmp_path: Path, rng: torch.Generator) -> None:
    checkpoint = Checkpoint(write(tmp_path, glm_config(), glm_tensors(rng)))
    assert isinstance(read_layer(checkpoint, 0), DenseWeights)
    assert isinstance(read_layer(checkpoint, 1), MoEWeights)
    with pytest.raises(ConfigError, match="layer 0 is dense; asked for: moe"):
        read_moe(checkpoint, 0)
    with pytest.raises(ConfigError, match="layer 1 is moe; asked for: dense"):
        read_dense(checkpoint, 1)
    with pytest.raises(ConfigError, match="layer is 3; allowed: 0 to 2"):
        read_layer(checkpoint, 3)


def test_tensors_outlive_the_files(tmp_path: Path, rng: torch.Generator) -> None:
    """Weights are copies: overwriting the file under them changes nothing."""
    tensors = deepseek_tensors(rng)
    file = write(tmp_path, deepseek_config(), tensors) / "model.safetensors"
    weights = read_moe(Checkpoint(tmp_path), 1)
    with file.open("r+b") as handle:
        handle.write(b"\xff" * file.stat().st_size)
    for name, weight in _projections(weights).items():
        base = f"layers.1.ffn.experts.0.{DEEPSEEK_WORDS[name]}"
        assert _same_bytes(weight.codes[0], tensors[f"{base}.weight"].view(torch.uint8))
    assert _same_bytes(weights.router.weight, tensors["layers.1.ffn.gate.weight"])


def test_progress_counts_the_bytes_of_the_layer(tmp_path: Path, rng: torch.Generator) -> None:
    checkpoint = Checkpoint(write(tmp_path, deepseek_config(), deepseek_tensors(rng)))
    read: list[int] = []
    read_moe(checkpoint, 1, read.append)
    inside = checkpoint.names_under("layers.1.ffn.")
    assert sum(read) == sum(checkpoint.tensors[name].nbytes for name in inside)


def test_file_that_vanishes_after_opening(tmp_path: Path, rng: torch.Generator) -> None:
    checkpoint = Checkpoint(write(tmp_path, deepseek_config(), deepseek_tensors(rng)))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: layers.* cannot be read"):
        read_moe(checkpoint, 1)


def test_native_helper_covers_both_ends(rng: torch.Generator) -> None:
    """The maker itself: byte 0x71 is (0.5, 6), the low nibble first (field fault A6)."""
    tensors: Tensors = native(rng, "w", 1, 32)
    tensors["w.weight"].view(torch.uint8)[0, 0] = 0x71
    tensors["w.scale"].view(torch.uint8)[0, 0] = 127
    assert decode_native(tensors, "w")[0, :2].tolist() == [0.5, 6.0]
