"""load_model with every layout of checkpoint/: the blocks have the bits of load_layer."""

import re

import pytest
import torch

from exactmoe import load_layer
from exactmoe.checkpoint import Checkpoint, audit
from exactmoe.errors import CheckpointError, Unsupported
from exactmoe.formats import quantize
from exactmoe.hf import blocks, load_model, save_model
from saved_bytes import assert_saves_as, assert_written_as

MLP = r"layers.*\.(mlp|ffn)\..*((gate|up|down)_proj|w[123])\.weight$"
WORDS = {"glm5_next": ("gate_proj", "up_proj", "down_proj"), "deepseek_v4": ("w1", "w3", "w2")}


def every_mlp(name):
    return re.search(MLP, name) is not None


def compressed(tensors):
    """ModelOpt's tensors as compressed-tensors has them: codes and divisors under other names."""
    for name in [name for name in tensors if name.endswith(".weight_scale_2")]:
        base = name.removesuffix(".weight_scale_2")
        tensors[f"{base}.weight_packed"] = tensors.pop(f"{base}.weight")
        tensors[f"{base}.weight_global_scale"] = (1 / tensors.pop(name)).reshape(1)
        tensors[f"{base}.input_global_scale"] = tensors.pop(f"{base}.input_scale").reshape(1)


def compressed_mxfp4(tensors):
    """Native MXFP4 as compressed-tensors has it: everything U8, under other names."""
    for name in [name for name in tensors if name.endswith(".scale")]:
        base = name.removesuffix(".scale")
        tensors[f"{base}.weight_packed"] = tensors.pop(f"{base}.weight").view(torch.uint8)
        tensors[f"{base}.weight_scale"] = tensors.pop(name).view(torch.uint8)


def hybrid(tensors):
    """NVIDIA's DeepSeek-V4: NVFP4 under DeepSeek's names, no `.scale` left."""
    for name in [name for name in tensors if name.endswith(".scale")]:
        base = name.removesuffix(".scale")
        del tensors[name]
        codes = tensors[f"{base}.weight"].view(torch.uint8)
        tensors[f"{base}.weight"] = codes
        packed = quantize(torch.randn(1, codes.shape[0], codes.shape[1] * 2) * 0.1, "nvfp4")
        tensors[f"{base}.weight_scale"] = packed.scales[0].view(torch.float8_e4m3fn)
        tensors[f"{base}.weight_scale_2"] = packed.global_scale[0].clone()
        tensors[f"{base}.input_scale"] = torch.tensor(0.5)


def scales_as(dtype):
    def change(tensors):
        for name in [n for n, t in tensors.items() if t.dtype == torch.float8_e8m0fnu]:
            codes = tensors[name].view(torch.uint8)
            powers = torch.pow(2.0, codes.double() - 127).float()
            tensors[name] = powers if dtype == torch.float32 else codes

    return change


def stacked(family):
    """All experts of a layer in one tensor, gate first."""
    gate, up, down = WORDS[family]

    def change(tensors):
        blocks = {n.partition(".experts.")[0] for n in tensors if re.search(r"\.experts\.\d+\.", n)}
        for block in sorted(blocks):
            for word, projections in (("gate_up_proj", (gate, up)), ("down_proj", (down,))):
                for leaf, suffix in (
                    ("weight", ""),
                    ("weight_scale", "_scale"),
                    ("scale", "_scale"),
                    ("weight_scale_2", "_scale_2"),
                    ("input_scale", "_input_scale"),
                ):
                    names = [
                        [f"{block}.experts.{e}.{name}.{leaf}" for name in projections]
                        for e in range(8)
                    ]
                    if names[0][0] not in tensors:
                        continue
                    dtype = tensors[names[0][0]].dtype
                    rows = [[as_bytes(tensors.pop(name)) for name in row] for row in names]
                    joined = torch.stack([torch.cat(row) for row in rows]).view(dtype)
                    tensors[f"{block}.experts.{word}{suffix}"] = joined

    return change


def fp8(suffix, where):
    """Weights of the MLPs whose name matches `where`, in 128 x 128 blocks."""

    def change(tensors):
        for name in [name for name in tensors if every_mlp(name) and re.search(where, name)]:
            weight = tensors[name].float()
            blocks = [-(-size // 128) for size in weight.shape]
            scales = torch.full(blocks, 2.0**-9)
            if suffix == "weight_scale_inv":
                rise = 1.3 if "up" in name else 1.1
                scales = scales * torch.linspace(rise - 0.1, rise, scales.numel()).view(blocks)
            spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
            codes = weight / spread[: weight.shape[0], : weight.shape[1]]
            tensors[name] = codes.clamp(-448, 448).to(torch.float8_e4m3fn)
            if suffix != "weight_scale_inv":
                scales = scales.to(torch.float8_e8m0fnu if suffix == "scale" else torch.bfloat16)
            tensors[f"{name.removesuffix('weight')}{suffix}"] = scales

    return change


def as_bytes(tensor):
    raw = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
    return raw.reshape(1) if raw.ndim == 0 else raw


def require_bits_of_load_layer(folder, dialect, rng):
    audit(Checkpoint(folder)).require_clean()
    formats = audit(Checkpoint(folder)).formats
    model = load_model(folder, progress=False)
    for index, block, layer in blocks(model):
        assert dialect in str(formats[index]) or not hasattr(block, "experts")
        x = torch.randn(5, layer.bank.hidden_size, generator=rng).bfloat16()
        ids = torch.randint(0, 256, (5,), generator=rng)
        hash_layer = getattr(getattr(layer, "router", None), "table", None) is not None
        inputs = {"token_ids": ids} if hash_layer else {}
        found = block(x[None], **({"input_ids": ids[None]} if hash_layer else {}))[0]
        expected = load_layer(folder, index)(x, **inputs)
        assert torch.count_nonzero(expected)
        assert found.view(torch.int16).equal(expected.view(torch.int16))
    assert_saves_as(model, folder, folder.parent / "saved")
    assert_written_as(model, folder, folder.parent / "written")
    return model


@pytest.mark.parametrize("family", ["glm5_next"], indirect=True)
@pytest.mark.parametrize("packed", ["routed experts", "every part"])
def test_compressed_tensors(write, family, packed, rng):
    how = {"packed": every_mlp} if packed == "every part" else {}
    model = require_bits_of_load_layer(
        write(change=compressed, **how), "compressed-tensors NVFP4", rng
    )
    for _, block, layer in blocks(model):
        if hasattr(block, "experts"):
            assert layer.bank.gate.global_scale_op == layer.bank.down.global_scale_op == "divide"


@pytest.mark.parametrize("family", ["deepseek_v4"], indirect=True)
def test_compressed_tensors_mxfp4(write, family, rng):
    folder = write(change=compressed_mxfp4, packed=every_mlp)
    require_bits_of_load_layer(folder, "compressed-tensors MXFP4", rng)


@pytest.mark.parametrize("family", ["deepseek_v4"], indirect=True)
def test_nvidia_deepseek(write, family, rng):
    require_bits_of_load_layer(write(change=hybrid), "ModelOpt NVFP4", rng)


@pytest.mark.parametrize("family", ["deepseek_v4"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_e8m0_scales_in_other_dtypes(write, family, dtype, rng):
    """Field fault A5: transformers would cast byte 120 to 128.0."""
    folder = write(change=scales_as(dtype), packed=every_mlp)
    model = require_bits_of_load_layer(folder, "DeepSeek MXFP4", rng)
    for _, block, _ in blocks(model):
        assert block.experts.gate_up_proj_scale.element_size() == 1


@pytest.mark.parametrize("family", ["deepseek_v4"], indirect=True)
@pytest.mark.parametrize("where", ["experts.3.w2.scale", "shared_experts.w1.scale"])
def test_float32_scales_that_are_no_powers_of_two(write, family, where):
    def change(tensors):
        scales_as(torch.float32)(tensors)
        tensors[f"layers.2.ffn.{where}"][5, 1] = 0.75

    message = rf"layers\.2\.ffn\.{where}: block scale 0.75 at row 5, block 1; allowed"
    with pytest.raises(CheckpointError, match=message):
        load_model(write(change=change, packed=every_mlp), progress=False)


@pytest.mark.parametrize("family", ["deepseek_v4"], indirect=True)
def test_e8m0_scales_in_mixed_dtypes_are_refused(write, family):
    def change(tensors):
        name = "layers.1.ffn.experts.5.w3.scale"
        tensors[name] = tensors[name].view(torch.uint8)

    with pytest.raises(Unsupported, match="E8M0 scales are F8_E8M0 and U8; allowed in a whole"):
        load_model(write(change=change), progress=False)


def test_stacked(write, family, rng, tmp_path):
    folder = write(change=stacked(family))
    require_bits_of_load_layer(folder, "stacked ", rng)
    several = load_model(folder, cards=("cpu", "cpu"), progress=False)
    with pytest.raises(Unsupported, match="holds the experts of all cards; allowed by card"):
        save_model(several, tmp_path / "by_card", by_card=True)


@pytest.mark.parametrize("family", ["glm5_next"], indirect=True)
def test_one_global_scale_per_stacked_expert_is_refused(write, family):
    def change(tensors):
        stacked(family)(tensors)
        for name in [n for n in tensors if n.endswith("down_proj_scale_2")]:
            tensors[name] = tensors[name].reshape(-1)

    with pytest.raises(Unsupported, match=r"down_proj_scale_2 \(F32 \[8\]\): allowed in a whole"):
        load_model(write(change=change), progress=False)


@pytest.mark.parametrize("suffix", ["weight_scale_inv", "scale", "weight_scale"])
def test_fp8_dense_and_shared_parts(write, family, suffix, rng):
    """DeepSeek-V4's shared experts are published so, and GLM's dense layers in its FP8 export."""
    change = fp8(suffix, r"shared_experts|layers\.0\.mlp\.(gate|up|down)")
    model = require_bits_of_load_layer(write(change=change), "FP8 128x128", rng)
    for _, _, layer in blocks(model):
        dense = getattr(layer, "shared", layer)
        assert dense.bank.formats == ("fp8", "fp8", "fp8")


@pytest.mark.parametrize("family", ["glm5_next"], indirect=True)
@pytest.mark.parametrize("suffix", ["weight_scale_inv", "scale", "weight_scale"])
def test_fp8_routed_experts(write, family, suffix, rng):
    """GLM's own FP8 export; blocks of gate and up are their own."""
    folder = write(change=fp8(suffix, r"\.experts\."), packed=lambda name: False)
    model = require_bits_of_load_layer(folder, f"FP8 128x128 with {suffix}", rng)
    for _, block, layer in blocks(model):
        if hasattr(block, "experts"):
            assert layer.bank.formats == ("fp8", "fp8", "fp8")
            assert block.experts.gate_up_proj.dtype == torch.float8_e4m3fn
            assert block.experts.gate_up_proj_scale.shape == (8, 2, 1)
            gate, up = layer.bank.gate.scales, layer.bank.up.scales
            assert suffix != "weight_scale_inv" or not gate.equal(up)


@pytest.mark.parametrize("family", ["deepseek_v4"], indirect=True)
def test_fp8_routed_experts_take_class_a16(write, family):
    change = fp8("scale", r"\.experts\.")
    folder = write(change=change, packed=lambda name: False)
    with pytest.raises(Unsupported, match="FP8 experts run in class a16 only"):
        load_model(folder, progress=False)
    model = load_model(folder, numerics="a16", progress=False)
    assert {layer.bank.formats for _, _, layer in blocks(model)} == {("fp8", "fp8", "fp8")}
