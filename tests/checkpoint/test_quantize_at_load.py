"""BF16 experts quantised at load: the bytes of quantising all at once, the originals one by one."""

import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoint_layouts import (
    GLM_BLOCK,
    GLM_SIZES,
    GLM_WORDS,
    decode_plain,
    decoded,
    glm_bf16_tensors,
    glm_mtp_tensors,
    projections,
    same_bytes,
    stack,
)
from checkpoint_maker import Tensors, glm_config, glm_tensors, plain, write
from exactmoe.bank import quantize_experts
from exactmoe.checkpoint import Checkpoint, Quantization, quantize, read_layer, read_moe
from exactmoe.checkpoint.load import MoEWeights
from exactmoe.errors import CheckpointError, ConfigError, Unsupported
from exactmoe.layer import MoELayer
from exactmoe.load import load_layer

RULES = [("nvfp4", None), ("nvfp4", "four_over_six"), ("mxfp4", None), ("mxfp4", "no_clip")]


def _expected(tensors: Tensors, block: str, format: str, rule: str | None) -> dict[str, Any]:
    values = decoded(tensors, block, GLM_WORDS, decode_plain)
    bank = quantize_experts(*(values[n].bfloat16() for n in GLM_WORDS), format, rule)
    return {"gate": bank.gate, "up": bank.up, "down": bank.down}


@pytest.mark.parametrize(("format", "rule"), RULES)
@pytest.mark.parametrize("stacked", [False, True])
def test_bytes_are_those_of_quantising_all_at_once(
    tmp_path: Path, rng: torch.Generator, format: str, rule: str | None, stacked: bool
) -> None:
    tensors = glm_bf16_tensors(rng)
    expected = _expected(tensors, GLM_BLOCK, format, rule)
    if stacked:
        tensors = stack(tensors, GLM_BLOCK, GLM_WORDS)
    checkpoint = Checkpoint(write(tmp_path, glm_config(), tensors, shards=2))
    read: list[int] = []
    weights = read_layer(checkpoint, 1, read.append, Quantization(format, rule))
    assert isinstance(weights, MoEWeights)
    inside = checkpoint.names_under(f"{GLM_BLOCK}.")
    assert sum(read) == sum(checkpoint.tensors[name].nbytes for name in inside)
    for name, weight in projections(weights).items():
        assert (weight.format, weight.num_experts) == (format, 4)
        for part in ("codes", "scales", "global_scale"):
            found, wanted = getattr(weight, part), getattr(expected[name], part)
            assert (found is None and wanted is None) or same_bytes(found, wanted)
    # The shared expert stays as it is stored.
    assert weights.shared is not None and weights.shared.up.format == "bf16"


def test_mtp_layer(tmp_path: Path, rng: torch.Generator) -> None:
    tensors = glm_mtp_tensors(rng, lambda base, name, e: plain(rng, base, *GLM_SIZES[name]))
    path = write(tmp_path, glm_config(), tensors)
    layer = load_layer(path, 2, quantize="nvfp4")
    assert isinstance(layer, MoELayer)
    expected = _expected(tensors, "model.language_model.layers.2.mlp", "nvfp4", None)
    assert same_bytes(layer.bank.down.codes, expected["down"].codes)
    x = torch.randn(2, 64, generator=rng).bfloat16()
    assert torch.isfinite(layer(x)).all() and torch.count_nonzero(layer(x))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("stacked", [False, True])
def test_values_that_are_not_finite(
    tmp_path: Path, rng: torch.Generator, value: float, stacked: bool
) -> None:
    tensors = glm_bf16_tensors(rng)
    name, place = f"{GLM_BLOCK}.experts.2.up_proj.weight", ""
    tensors[name][5, 7] = value
    if stacked:
        tensors = stack(tensors, GLM_BLOCK, GLM_WORDS)
        name, place = f"{GLM_BLOCK}.experts.gate_up_proj", r"\[2, 32:64\]"
    checkpoint = Checkpoint(write(tmp_path, glm_config(), tensors, shards=3))
    file = checkpoint.tensors[name].file
    message = f"{file}: {name}{place}: weight is {value} at expert 2, row 5, column 7"
    with pytest.raises(CheckpointError, match=message):
        read_layer(checkpoint, 1, None, Quantization("mxfp4"))


def test_originals_are_never_together(
    tmp_path: Path, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most MAX_WORKERS originals are alive."""
    checkpoint = Checkpoint(write(tmp_path, glm_config(), glm_bf16_tensors(rng)))
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    most = 0
    inner = quantize.quantize

    def counted(original: Tensor, *rest: Any) -> Any:
        nonlocal most
        alive.add(original)
        most = max(most, len(alive))
        time.sleep(0.05)  # long enough for every worker to come here
        return inner(original, *rest)

    monkeypatch.setattr(quantize, "quantize", counted)
    monkeypatch.setattr(quantize, "MAX_WORKERS", 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    read_layer(checkpoint, 1, None, Quantization("nvfp4"))
    assert 1 <= most <= 2 and not alive


def test_refusals(tmp_path: Path, rng: torch.Generator) -> None:
    path = write(tmp_path / "bf16", glm_config(), glm_bf16_tensors(rng))
    with pytest.raises(ConfigError, match="quantize is 'int4'; allowed: nvfp4, mxfp4, None"):
        load_layer(path, 1, quantize="int4")
    with pytest.raises(ConfigError, match="rule is 'no_clip'; allowed: modelopt, four_over_six"):
        load_layer(path, 1, quantize=Quantization("nvfp4", "no_clip"))
    with pytest.raises(ConfigError, match="layer 0 has no routed experts; allowed: None"):
        load_layer(path, 0, quantize="nvfp4")
    packed = write(tmp_path / "packed", glm_config(), glm_tensors(rng))
    with pytest.raises(ConfigError, match="layer 1 stores gate as ModelOpt NVFP4; allowed: None"):
        load_layer(packed, 1, quantize="nvfp4")
    assert read_moe(Checkpoint(path), 1).bank.formats == ("bf16", "bf16", "bf16")


def test_a_width_that_the_blocks_do_not_divide(tmp_path: Path, rng: torch.Generator) -> None:
    sizes = {"gate": (48, 64), "up": (48, 64), "down": (64, 48)}
    tensors = {n: t for n, t in glm_tensors(rng).items() if not n.startswith(f"{GLM_BLOCK}.")}
    for name, word in GLM_WORDS.items():
        tensors |= plain(rng, f"{GLM_BLOCK}.shared_experts.{word}", *sizes[name])
        for expert in range(4):
            tensors |= plain(rng, f"{GLM_BLOCK}.experts.{expert}.{word}", *sizes[name])
    tensors[f"{GLM_BLOCK}.gate.weight"] = torch.zeros(4, 64).bfloat16()
    tensors[f"{GLM_BLOCK}.gate.e_score_correction_bias"] = torch.zeros(4)
    path = write(tmp_path, glm_config(moe_intermediate_size=48), tensors)
    assert isinstance(load_layer(path, 1, quantize="nvfp4"), MoELayer)
    message = r"experts\.0\.down_proj\.weight: k is 48 in a mxfp4 weight; .* multiple of 32"
    with pytest.raises(Unsupported, match=message):
        load_layer(path, 1, quantize="mxfp4")
