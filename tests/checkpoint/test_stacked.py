"""All experts in one tensor: gate first, each expert and projection its own part."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoint_layouts import (
    DEEPSEEK_WORDS,
    GLM_BLOCK,
    GLM_WORDS,
    decode_plain,
    decoded,
    glm_bf16_tensors,
    projections,
    same_bytes,
    stack,
    truth,
)
from checkpoint_maker import (
    Tensors,
    decode_modelopt,
    decode_native,
    deepseek_config,
    deepseek_tensors,
    glm_config,
    glm_tensors,
    write,
)
from exactmoe.checkpoint import Checkpoint, audit, read_moe
from exactmoe.formats import dequantize
from exactmoe.layer import MoELayer
from exactmoe.load import load_layer

Make = Callable[[torch.Generator], Tensors]
Decode = Callable[[Tensors, str], Tensor]
CASES = [
    (glm_config, glm_tensors, GLM_BLOCK, GLM_WORDS, decode_modelopt),
    (glm_config, glm_bf16_tensors, GLM_BLOCK, GLM_WORDS, decode_plain),
    (deepseek_config, deepseek_tensors, "layers.1.ffn", DEEPSEEK_WORDS, decode_native),
]
IDS = ["nvfp4", "bf16", "mxfp4"]


@pytest.mark.parametrize(("config", "make", "block", "words", "decode"), CASES, ids=IDS)
def test_stacked_is_what_one_tensor_per_expert_is(
    tmp_path: Path,
    rng: torch.Generator,
    config: Callable[..., dict[str, Any]],
    make: Make,
    block: str,
    words: dict[str, str],
    decode: Decode,
) -> None:
    single = make(rng)
    stacked = stack(single, block, words)
    assert f"{block}.experts.gate_up_proj" in stacked
    path = write(tmp_path / "stacked", config(), stacked)
    report = audit(Checkpoint(path))
    report.require_clean()
    assert report.formats[1]["routed experts"].startswith("stacked ")
    read: list[int] = []
    weights = projections(read_moe(Checkpoint(path), 1, read.append))
    assert sum(read) == sum(e.info.nbytes for e in report.consumed if e.layer == 1)
    values = decoded(single, block, words, decode)
    original = read_moe(Checkpoint(write(tmp_path / "single", config(), single)), 1)
    for name, weight in projections(original).items():
        assert same_bytes(weights[name].codes, weight.codes)
        assert weights[name].global_scale_op == weight.global_scale_op
        assert same_bytes(dequantize(weights[name]), values[name])
    layers = [load_layer(tmp_path / kind, 1, numerics="a16") for kind in ("stacked", "single")]
    hidden = values["down"].shape[1]
    x = torch.randn(2, hidden, generator=rng).bfloat16()
    slots = torch.tensor([[3, 0], [1, 2]])
    factors = torch.tensor([[0.5, 0.25], [0.7, 0.1]])
    results = []
    for layer in layers:
        assert isinstance(layer, MoELayer)
        results.append(layer.experts(x, slots, factors))
    assert same_bytes(*results)
    expected = truth(x, slots, factors, values, 10.0)
    assert (results[0].double() - expected).norm() < 2**-7 * expected.norm()


def test_a6_gate_is_the_first_half(tmp_path: Path, rng: torch.Generator) -> None:
    """Field fault A6 for stacked rows: expert and half are told apart by the global scale too."""
    tensors = stack(glm_tensors(rng), GLM_BLOCK, GLM_WORDS)
    codes = tensors[f"{GLM_BLOCK}.experts.gate_up_proj"]
    for expert in range(4):
        codes[expert, :32] = 16 * expert + 1
        codes[expert, 32:] = 16 * expert + 2
    scales = torch.tensor([[2.0**-e, 2.0**e] for e in range(4)])
    tensors[f"{GLM_BLOCK}.experts.gate_up_proj_scale_2"] = scales
    bank = read_moe(Checkpoint(write(tmp_path, glm_config(), tensors)), 1).bank
    for expert in range(4):
        assert bank.gate.codes[expert].unique().tolist() == [16 * expert + 1]
        assert bank.up.codes[expert].unique().tolist() == [16 * expert + 2]
    assert bank.gate.global_scale is not None and bank.up.global_scale is not None
    assert bank.gate.global_scale.tolist() == [1.0, 0.5, 0.25, 0.125]
    assert bank.up.global_scale.tolist() == [1.0, 2.0, 4.0, 8.0]


def test_one_global_scale_per_expert(tmp_path: Path, rng: torch.Generator) -> None:
    """[E]: gate and up of an expert share it."""
    tensors = stack(glm_tensors(rng), GLM_BLOCK, GLM_WORDS)
    for word in ("gate_up_proj", "down_proj"):
        tensors[f"{GLM_BLOCK}.experts.{word}_scale_2"] = torch.tensor([1.0, 3.0, 5.0, 7.0])
    weights = read_moe(Checkpoint(write(tmp_path, glm_config(), tensors)), 1)
    for weight in projections(weights).values():
        assert weight.global_scale is not None
        assert weight.global_scale.tolist() == [1.0, 3.0, 5.0, 7.0]


def test_stacked_down_beside_single_gate_and_up(tmp_path: Path, rng: torch.Generator) -> None:
    single = glm_tensors(rng)
    stacked = stack(single, GLM_BLOCK, GLM_WORDS)
    tensors = {name: t for name, t in single.items() if ".experts." not in name}
    tensors |= {
        name: tensor
        for name, tensor in single.items()
        if ".experts." in name and ".down_proj." not in name
    }
    tensors |= {name: t for name, t in stacked.items() if ".experts.down_proj" in name}
    path = write(tmp_path, glm_config(), tensors)
    audit(Checkpoint(path)).require_clean()
    values = decoded(single, GLM_BLOCK, GLM_WORDS, decode_modelopt)
    for name, weight in projections(read_moe(Checkpoint(path), 1)).items():
        assert same_bytes(dequantize(weight), values[name])
