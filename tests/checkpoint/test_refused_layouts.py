"""What is not run is refused by name: the error says what was found, and why or what is known."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from checkpoint_layouts import GLM_BLOCK
from checkpoint_maker import Tensors, glm_config, glm_tensors, write
from exactmoe.checkpoint import Checkpoint, audit, read_layer
from exactmoe.errors import CheckpointError, Unsupported
from exactmoe.families import family_of


def _gpt_oss() -> Tensors:
    tensors: Tensors = {}
    for word, rows, columns in (("gate_up_proj", 64, 64), ("down_proj", 64, 32)):
        base = f"{GLM_BLOCK}.experts.{word}"
        tensors[f"{base}_blocks"] = torch.zeros(4, rows, columns // 32, 16, dtype=torch.uint8)
        tensors[f"{base}_scales"] = torch.zeros(4, rows, columns // 32, dtype=torch.uint8)
        tensors[f"{base}_bias"] = torch.zeros(4, rows, dtype=torch.bfloat16)
    return tensors


def test_gpt_oss_layout(tmp_path: Path, rng: torch.Generator) -> None:
    tensors = {n: t for n, t in glm_tensors(rng).items() if f"{GLM_BLOCK}.experts." not in n}
    checkpoint = Checkpoint(write(tmp_path, glm_config(), tensors | _gpt_oss()))
    message = r"gate_up_proj_\w+ \(.*\) is gpt-oss MXFP4, not run: .*interleaved.*bias"
    with pytest.raises(Unsupported, match=message) as caught:
        read_layer(checkpoint, 1)
    assert "interleaved" in caught.value.reason
    report = audit(checkpoint)
    assert {finding.tensor for finding in report.errors} == set(_gpt_oss())
    with pytest.raises(Unsupported, match="6 errors"):
        report.require_clean()


def test_gpt_oss_model() -> None:
    with pytest.raises(Unsupported, match=r"'gpt_oss': .*interleaved.*biases.*sigmoid\(1\.702"):
        family_of({"model_type": "gpt_oss"})


UNKNOWN: dict[str, dict[str, Tensor]] = {
    # NVIDIA's FP4-Local stores scale factors compressed; its names are not published.
    "compressed scales": {
        "weight": torch.zeros(32, 32).byte(),
        "weight_scale": torch.zeros(100).byte(),
        "weight_scale_codebook": torch.zeros(16),
    },
    "float16": {"weight": torch.zeros(32, 64).half()},
    "float32": {"weight": torch.zeros(32, 64)},
    "integers": {"qweight": torch.zeros(32, 8).int(), "qzeros": torch.zeros(4, 1).int()},
    "FP8 per tensor": {
        "weight": torch.zeros(32, 64).to(torch.float8_e4m3fn),
        "weight_scale": torch.ones(()),
        "weight_shape": torch.ones(2),
    },
    "codes without scales": {"weight": torch.zeros(32, 64).to(torch.float8_e4m3fn)},
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_unknown_layouts(tmp_path: Path, rng: torch.Generator, kind: str) -> None:
    tensors = glm_tensors(rng)
    base = f"{GLM_BLOCK}.shared_experts.gate_proj"
    del tensors[f"{base}.weight"]
    tensors |= {f"{base}.{leaf}": tensor for leaf, tensor in UNKNOWN[kind].items()}
    checkpoint = Checkpoint(write(tmp_path, glm_config(), tensors))
    report = audit(checkpoint)
    assert {finding.tensor for finding in report.errors if finding.info is not None} == {
        f"{base}.{leaf}" for leaf in UNKNOWN[kind]
    }
    with pytest.raises(CheckpointError) as caught:
        read_layer(checkpoint, 1)
    message = str(caught.value)
    assert f"unknown layout of {base}: " in message
    found, _, known = message.partition("; known: ")
    for leaf, tensor in UNKNOWN[kind].items():
        dtype = checkpoint.tensors[f"{base}.{leaf}"].dtype
        assert f"{base}.{leaf} {dtype} {list(tensor.shape)}" in found
    for words in ("ModelOpt NVFP4 (weight U8,", "compressed-tensors NVFP4 (weight_packed U8,"):
        assert words in known
    assert "DeepSeek MXFP4 (weight I8, scale F8_E8M0 or U8 or F32)" in known


def test_unknown_stacked_layout(tmp_path: Path, rng: torch.Generator) -> None:
    tensors = {n: t for n, t in glm_tensors(rng).items() if f"{GLM_BLOCK}.experts." not in n}
    for word in ("gate_up_proj", "down_proj"):
        tensors[f"{GLM_BLOCK}.experts.{word}"] = torch.zeros(4, 64, 64).half()
    checkpoint = Checkpoint(write(tmp_path, glm_config(), tensors))
    base = f"{GLM_BLOCK}.experts.gate_up_proj"
    message = rf"unknown layout of {base}: {base} F16 \[4, 64, 64\]; known: stacked NVFP4 \(gate_up"
    with pytest.raises(CheckpointError, match=message):
        read_layer(checkpoint, 1)
