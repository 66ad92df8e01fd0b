"""quantize_checkpoint and convert_checkpoint: what lies beside the weights that are rewritten."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_layouts import GLM_BLOCK, GLM_SIZES, GLM_WORDS, fp8, stack, with_experts
from checkpoint_maker import Tensors, glm_config, glm_tensors, plain, write
from exactmoe.checkpoint.rewrite import QuantizeRequest, convert_checkpoint, quantize_checkpoint
from exactmoe.checkpoint.rewrite.published import ignored_modules
from exactmoe.errors import CheckpointError, Unsupported
from saved_bytes import tensors_in

LAYERS = "model.language_model.layers"
TO_MXFP4 = QuantizeRequest("mxfp4", lossy=True)
TO_NVFP4 = QuantizeRequest("nvfp4", lossy=True)


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return found


def with_plain_experts(tensors: Tensors, rng: torch.Generator, layer: int) -> Tensors:
    return with_experts(
        tensors, f"{LAYERS}.{layer}.mlp", GLM_WORDS, lambda b, p, e: plain(rng, b, *GLM_SIZES[p])
    )


@pytest.mark.parametrize("shape", [(4,), (1, 4), (2, 1), (3, 2)])
def test_left_fp8_with_scales_of_another_shape(
    tmp_path: Path, rng: torch.Generator, shape: tuple[int, ...]
) -> None:
    """Four scales in another order would be taken for [2, 2] silently."""
    base = f"{LAYERS}.0.self_attn.o_proj"
    tensors = with_plain_experts(glm_tensors(rng), rng, 1)
    tensors |= fp8(rng, base, 130, 256, "weight_scale_inv")
    tensors[f"{base}.weight_scale_inv"] = torch.ones(shape)
    source = write(tmp_path / "in", glm_config(), tensors)
    said = re.escape(f"(F32 {list(shape)}): FP8 128x128 with weight_scale_inv asks for [2, 2]")
    with pytest.raises(Unsupported, match=rf"{base}\.weight_scale_inv {said}"):
        quantize_checkpoint(source, tmp_path / "out", TO_NVFP4)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("is_stacked", [False, True])
def test_no_stale_input_scale_stays(tmp_path: Path, rng: torch.Generator, is_stacked: bool) -> None:
    """MXFP4 is weights only here: a scale for NVFP4 activations would mean something else."""
    tensors = glm_tensors(rng)
    if is_stacked:
        tensors = stack(tensors, GLM_BLOCK, GLM_WORDS)
    attention = f"{LAYERS}.0.self_attn.o_proj"
    tensors |= fp8(rng, attention, 64, 64, "weight_scale_inv")
    beside = {
        f"{attention}.{word}": torch.tensor(0.5) for word in ("input_scale", "k_scale", "bias")
    }
    tensors |= beside
    assert sum("input_scale" in name for name in tensors) == (3 if is_stacked else 13)
    source = write(tmp_path / "in", glm_config(), tensors)
    quantize_checkpoint(source, tmp_path / "out", TO_MXFP4)
    after = tensors_in(tmp_path / "out")
    assert after[f"{attention}.weight"].dtype == torch.bfloat16
    assert after[f"{attention}.bias"].equal(beside[f"{attention}.bias"])
    assert [name for name in after if "input_scale" in name] == []


@pytest.mark.parametrize("run", ["quantize", "convert"])
def test_a_broken_layer_is_not_copied(tmp_path: Path, rng: torch.Generator, run: str) -> None:
    """Only multi-token prediction layers may be incomplete."""
    tensors = glm_tensors(rng)
    name = f"{GLM_BLOCK}.experts.3.up_proj.weight_scale"
    del tensors[name]
    source, out = write(tmp_path / "in", glm_config(), tensors), tmp_path / "out"
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        if run == "quantize":
            quantize_checkpoint(source, out, TO_MXFP4)
        else:
            convert_checkpoint(source, out, "compressed-tensors", lossy=True)
    assert not out.exists()


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_experts_that_stay_are_one_wildcard(
    tmp_path: Path, rng: torch.Generator, dialect: str
) -> None:
    """Of an incomplete multi-token prediction layer, copied with a note; engines match prefixes."""
    tensors = with_plain_experts(glm_tensors(rng), rng, 1)
    config = glm_config(num_nextn_predict_layers=1)
    mtp = f"{LAYERS}.2.mlp.experts"
    tensors[f"{mtp}.1.up_proj.weight"] = torch.zeros(32, 64).bfloat16()
    source, out = write(tmp_path / "in", config, tensors), tmp_path / "out"
    request = TO_NVFP4 if dialect == "modelopt" else TO_MXFP4
    _, notes = quantize_checkpoint(source, out, request)
    assert notes == ("layer 2 (multi-token prediction) is copied as it is",)
    after, ignore = tensors_in(out), config_of(out)["ignore"]
    assert after[f"{mtp}.1.up_proj.weight"].equal(tensors[f"{mtp}.1.up_proj.weight"])
    experts = [pattern for pattern in ignore if "experts" in pattern and "shared" not in pattern]
    escaped = mtp.replace(".", r"\.")
    assert experts == [f"{mtp}*" if dialect == "modelopt" else f"re:{escaped}.*"]


def test_ignored_modules() -> None:
    """Stacked experts too; what has block scales beside it is packed, and not ignored."""
    kept = ["a.q_proj.weight", "b.mlp.experts.gate_up_proj", "b.mlp.experts.down_proj"]
    kept += ["c.mlp.experts.0.w1.weight", "c.mlp.experts.1.w1.weight"]
    kept += ["d.mlp.experts.0.w1.weight", "d.mlp.experts.0.w1.scale"]
    expected = ["a.q_proj", "b.mlp.experts*", "c.mlp.experts*"]
    assert ignored_modules(kept, "{}*") == expected
    expected = ["a.q_proj", r"re:b\.mlp\.experts.*", r"re:c\.mlp\.experts.*"]
    assert ignored_modules(kept, "re:{}.*") == expected
