"""What quantize and convert write, taken apart as vLLM's loader takes it.

Names, dtypes and shapes of the parameters are those that vLLM makes for routed experts
(create_weights of ModelOptNvFp4FusedMoE in layers/quantization/modelopt.py and of the classes in
compressed_tensors_moe_w4a4_nvfp4.py and _mxfp4.py; vllm-project/vllm, 08f95fe5 and 00882314).
A tensor finds its parameter by make_expert_params_mapping: `experts.3.gate_proj.` becomes
`experts.w13_` for expert 3, first half;
`up_proj` the second half; `down_proj` becomes `experts.w2_`. DeepSeek-V4's loader says w1, w3, w2
and reads `.scale` as `.weight_scale` (models/deepseek_v4).
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from exactmoe.checkpoint import Checkpoint, MoEWeights, read_layer
from exactmoe.checkpoint.rewrite import QuantizeRequest, convert_checkpoint, quantize_checkpoint
from exactmoe.formats import dequantize
from synthetic_checkpoints import Synthetic, write_synthetic

E, H, N = 4, 256, 128  # experts, hidden size, intermediate size
# Dialect -> end of a parameter's name -> dtype, and shape of w13 and of w2 of one expert.
NVFP4 = {"weight_scale": (torch.float8_e4m3fn, (2 * N, H // 16), (H, N // 16))}
CODES = (torch.uint8, (2 * N, H // 2), (H, N // 2))
MODELOPT = NVFP4 | {"weight": CODES, "weight_scale_2": (torch.float32, (2,), ())}
COMPRESSED = NVFP4 | {"weight_packed": CODES, "weight_global_scale": (torch.float32, (2,), ())}
MXFP4 = {
    "weight_packed": CODES,
    "weight_scale": (torch.uint8, (2 * N, H // 32), (H, N // 32)),
}
DEEPSEEK = {
    "weight": (torch.int8, *CODES[1:]),
    "weight_scale": (torch.float8_e8m0fnu, *MXFP4["weight_scale"][1:]),
}
SHARDS = {"gate_proj": 0, "up_proj": 1, "down_proj": None, "w1": 0, "w3": 1, "w2": None}


def loaded(folder: Path, layer: str, table: dict[str, Any]) -> dict[str, Tensor]:
    """The parameters of one layer, filled as vLLM fills them; every tensor has a place."""
    parameters: dict[str, Tensor] = {}
    for name, (dtype, *shapes) in table.items():
        for what, shape in zip(("w13", "w2"), shapes, strict=True):
            parameters[f"{what}_{name}"] = torch.empty((E, *shape), dtype=dtype)
    left = {name: [(e, s) for e in range(E) for s in _halves(name)] for name in parameters}
    for file in folder.glob("*.safetensors"):
        for full, tensor in load_file(file).items():
            found = re.fullmatch(rf"{layer}\.experts\.(\d+)\.(\w+)\.(\w+)", full)
            if found is None:
                assert not full.startswith(f"{layer}.experts."), full
                continue
            expert, half = int(found[1]), SHARDS[found[2]]
            end = "weight_scale" if found[3] == "scale" else found[3]
            name = f"{'w2' if half is None else 'w13'}_{end}"
            left[name].remove((expert, half))
            place = parameters[name][expert]
            if half is not None:
                place = place.chunk(2)[half]
            assert tensor.dtype == place.dtype, full
            # A scalar is () or [1]; vLLM takes both.
            place.copy_(tensor.reshape(place.shape))
    assert not any(left.values()), left
    return parameters


def _halves(name: str) -> list[int | None]:
    return [0, 1] if name.startswith("w13") else [None]


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]).double()


def values(codes: Tensor, scales: Tensor, per: int) -> Tensor:
    """float64 [..., K]: the low nibble is the even column."""
    raw = codes.view(torch.uint8).long()
    pairs = torch.stack([E2M1[raw & 15], E2M1[raw >> 4]], -1).flatten(-2)
    return pairs * scales.double().repeat_interleave(per, -1)


def powers(scales: Tensor) -> Tensor:
    return torch.pow(2.0, scales.view(torch.uint8).double() - 127)


def require_same_weights(folder: Path, w13: Tensor, w2: Tensor) -> None:
    weights = read_layer(Checkpoint(folder), 1)
    assert isinstance(weights, MoEWeights)
    bank = weights.bank
    assert torch.cat([dequantize(bank.gate), dequantize(bank.up)], 1).equal(w13)
    assert dequantize(bank.down).equal(w2)


GLM = "model.language_model.layers.1.mlp"
SIZES = {"hidden_size": H, "intermediate_size": N, "num_experts": E}


@pytest.mark.parametrize("source", ["bf16", "deepseek", "stacked-mxfp4", "fp8"])
def test_modelopt_nvfp4(tmp_path: Path, source: str) -> None:
    path = write_synthetic(tmp_path / "in", Synthetic(dialect=source, **SIZES))
    quantize_checkpoint(path, tmp_path / "out", QuantizeRequest("nvfp4", lossy=True))
    found = loaded(tmp_path / "out", GLM, MODELOPT)
    scale = found["w13_weight_scale_2"]
    assert scale[:, 0].equal(scale[:, 1])  # vLLM takes the first for both
    w13 = values(found["w13_weight"], found["w13_weight_scale"].float(), 16)
    w2 = values(found["w2_weight"], found["w2_weight_scale"].float(), 16)
    scale_2 = found["w2_weight_scale_2"].double()[:, None, None]
    require_same_weights(tmp_path / "out", w13 * scale.double()[:, :1, None], w2 * scale_2)


def test_compressed_tensors_nvfp4(tmp_path: Path) -> None:
    path = write_synthetic(tmp_path / "in", Synthetic(dialect="bf16", **SIZES))
    quantize_checkpoint(path, tmp_path / "nvfp4", QuantizeRequest("nvfp4", lossy=True))
    convert_checkpoint(tmp_path / "nvfp4", tmp_path / "out", "compressed-tensors", lossy=True)
    found = loaded(tmp_path / "out", GLM, COMPRESSED)
    divisor = found["w13_weight_global_scale"]
    assert divisor[:, 0].equal(divisor[:, 1])
    w13 = values(found["w13_weight_packed"], found["w13_weight_scale"].float(), 16)
    w2 = values(found["w2_weight_packed"], found["w2_weight_scale"].float(), 16)
    divisor_2 = found["w2_weight_global_scale"].double()[:, None, None]
    require_same_weights(tmp_path / "out", w13 / divisor.double()[:, :1, None], w2 / divisor_2)


@pytest.mark.parametrize("source", ["bf16", "modelopt", "stacked-nvfp4"])
def test_compressed_tensors_mxfp4(tmp_path: Path, source: str) -> None:
    path = write_synthetic(tmp_path / "in", Synthetic(dialect=source, **SIZES))
    quantize_checkpoint(path, tmp_path / "out", QuantizeRequest("mxfp4", lossy=True))
    found = loaded(tmp_path / "out", GLM, MXFP4)
    w13 = values(found["w13_weight_packed"], powers(found["w13_weight_scale"]), 32)
    w2 = values(found["w2_weight_packed"], powers(found["w2_weight_scale"]), 32)
    require_same_weights(tmp_path / "out", w13, w2)


def test_deepseek_v4(tmp_path: Path) -> None:
    """Its published config: NVIDIA's NVFP4 under w1, w3, w2, and back to DeepSeek's own MXFP4."""
    path = write_synthetic(tmp_path / "in", Synthetic("deepseek_v4", "deepseek", **SIZES))
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (path / "config.json").write_text(json.dumps({**config, "expert_dtype": "fp4"}))
    quantize_checkpoint(path, tmp_path / "nv", QuantizeRequest("nvfp4"))
    found = loaded(tmp_path / "nv", "layers.1.ffn", MODELOPT)
    assert found["w13_weight_scale_2"][:, 0].equal(found["w13_weight_scale_2"][:, 1])
    quantize_checkpoint(tmp_path / "nv", tmp_path / "mx", QuantizeRequest("mxfp4"))
    found = loaded(tmp_path / "mx", "layers.1.ffn", DEEPSEEK)
    w13 = values(found["w13_weight"], powers(found["w13_weight_scale"]), 32)
    w2 = values(found["w2_weight"], powers(found["w2_weight_scale"]), 32)
    require_same_weights(tmp_path / "mx", w13, w2)
