"""Casts at the ends of what scales hold, and FP8 weights beside exact ones."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from exactmoe.checkpoint.rewrite import QuantizeRequest, quantize_checkpoint
from exactmoe.checkpoint.rewrite.casts import exact_cast, prove_equal
from exactmoe.errors import ConfigError
from exactmoe.formats import PackedWeight
from synthetic_checkpoints import Synthetic, write_synthetic

CODES = torch.full((1, 2, 32), 0x21, dtype=torch.uint8)


def nvfp4(global_scale: float, op: str) -> PackedWeight:
    """Every block scale is 2^8, the largest power of two of E4M3."""
    scales = torch.full((1, 2, 4), 0x78, dtype=torch.uint8)
    return PackedWeight("nvfp4", CODES, scales, torch.tensor([global_scale]), op)


@pytest.mark.parametrize(("op", "byte"), [("multiply", 127 + 10), ("divide", 127 + 6)])
def test_a_global_scale_multiplies_or_divides(op: str, byte: int) -> None:
    before = nvfp4(4.0, op)
    after = exact_cast(before, "mxfp4")
    assert after is not None and after.scales is not None
    assert after.scales.unique().tolist() == [byte]
    prove_equal(before, after, "w")


def test_more_than_e8m0_holds_is_no_cast() -> None:
    assert exact_cast(nvfp4(2.0**119, "multiply"), "mxfp4") is not None
    assert exact_cast(nvfp4(2.0**120, "multiply"), "mxfp4") is None


def test_no_global_scale_is_subnormal() -> None:
    """It would be lost where subnormals are flushed."""
    before = PackedWeight("mxfp4", CODES, torch.full((1, 2, 2), 1, dtype=torch.uint8))
    after = exact_cast(before, "nvfp4")
    assert after is not None and after.global_scale is not None
    assert float(after.global_scale) == 2.0**-126
    prove_equal(before, after, "w")


def test_fp8_beside_exact_casts_must_be_asked_for(tmp_path: Path) -> None:
    synthetic = Synthetic("glm5_next", "compressed-tensors-mxfp4", shards=1)
    source = write_synthetic(tmp_path / "in", synthetic)
    (file,) = source.glob("*.safetensors")
    tensors, name = load_file(file), "model.language_model.layers.0.self_attn.o_proj"
    weight = torch.full((130, 256), 0x39, dtype=torch.uint8)
    tensors[f"{name}.weight"] = weight.view(torch.float8_e4m3fn)
    tensors[f"{name}.weight_scale_inv"] = torch.ones(2, 2)
    save_file(tensors, file)
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, file.name)}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="o_proj is FP8 and becomes BF16 beside ModelOpt NVFP4"):
        quantize_checkpoint(source, tmp_path / "out", QuantizeRequest("nvfp4"))
    assert not (tmp_path / "out").exists()
