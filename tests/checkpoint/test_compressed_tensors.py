"""Weights compressed by the library compressed-tensors itself, and decompressed by it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import preset_name_to_scheme
from torch import Tensor

from checkpoint_layouts import GLM_BLOCK, GLM_SIZES, GLM_WORDS, projections, with_experts
from checkpoint_maker import Tensors, glm_config, glm_tensors, write
from exactmoe.checkpoint import Checkpoint, audit, read_moe
from exactmoe.formats import dequantize

KINDS = {
    "nvfp4": ("nvfp4-pack-quantized", "NVFP4A16"),
    "mxfp4": ("mxfp4-pack-quantized", "MXFP4A16"),
}


def _library(format: str) -> tuple[Any, Any]:
    name, preset = KINDS[format]
    return BaseCompressor.get_value_from_registry(name), preset_name_to_scheme(preset, ["Linear"])


def _compress(weight: Tensor, format: str) -> dict[str, Tensor]:
    compressor, scheme = _library(format)
    amax = weight.unflatten(-1, (-1, 16 if format == "nvfp4" else 32)).abs().amax(-1)
    state = {"weight": weight}
    if format == "nvfp4":
        state["weight_global_scale"] = (2688 / weight.abs().max()).reshape(1)
        scales = amax / 6 * state["weight_global_scale"]
        state["weight_scale"] = scales.to(torch.float8_e4m3fn).float()
    else:
        state["weight_scale"] = torch.pow(2.0, torch.floor(torch.log2(amax)) - 2)
    return compressor.compress(state, scheme)


@pytest.mark.parametrize("format", KINDS)
def test_the_library_reads_the_same_values(
    tmp_path: Path, rng: torch.Generator, format: str
) -> None:
    originals: dict[str, Tensor] = {}
    stored: dict[str, dict[str, Tensor]] = {}

    def make(base: str, projection: str, expert: int) -> Tensors:
        originals[base] = torch.randn(GLM_SIZES[projection], generator=rng) * 0.02
        stored[base] = _compress(originals[base], format)
        return {f"{base}.{leaf}": tensor for leaf, tensor in stored[base].items()}

    tensors = with_experts(glm_tensors(rng), GLM_BLOCK, GLM_WORDS, make)
    checkpoint = Checkpoint(write(tmp_path, glm_config(), tensors))
    report = audit(checkpoint)
    report.require_clean()
    assert report.formats[1]["routed experts"] == f"compressed-tensors {format.upper()}"
    compressor, scheme = _library(format)
    for name, weight in projections(read_moe(checkpoint, 1)).items():
        values = dequantize(weight)
        for expert in range(4):
            base = f"{GLM_BLOCK}.experts.{expert}.{GLM_WORDS[name]}"
            # The library rounds scales and products to bf16.
            theirs = compressor.decompress(stored[base], scheme)["weight"].double()
            assert (values[expert] - theirs).abs().max() <= 2**-6 * theirs.abs().max()
            assert torch.equal(values[expert] == 0, theirs == 0)
            assert (values[expert] - originals[base]).norm() < 0.15 * originals[base].norm()
