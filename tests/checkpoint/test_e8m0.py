"""Field faults A4 and A5: E8M0 scales as bytes, as F8_E8M0, or as the float32 that they mean."""

from pathlib import Path

import pytest
import torch

from checkpoint_layouts import DEEPSEEK_WORDS, e8m0_as, projections, same_bytes, stack
from checkpoint_maker import Tensors, deepseek_config, deepseek_tensors, write
from exactmoe.checkpoint import Checkpoint, audit, read_moe
from exactmoe.errors import CheckpointError
from exactmoe.formats import dequantize
from exactmoe.layer import MoELayer
from exactmoe.load import load_layer

DTYPES = (torch.float8_e8m0fnu, torch.uint8, torch.float32)
BASE = "layers.1.ffn.experts.2.w3"


def _with_scales(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    return {
        name: e8m0_as(tensor, dtype) if tensor.dtype == torch.float8_e8m0fnu else tensor
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("stacked", [False, True])
def test_a5_three_dtypes_one_layer(tmp_path: Path, rng: torch.Generator, stacked: bool) -> None:
    tensors = deepseek_tensors(rng)
    if stacked:
        tensors = stack(tensors, "layers.1.ffn", DEEPSEEK_WORDS)
    x = torch.randn(3, 128, generator=rng).bfloat16()
    results, scales = [], []
    for dtype in DTYPES:
        path = write(tmp_path / str(dtype), deepseek_config(), _with_scales(tensors, dtype))
        audit(Checkpoint(path)).require_clean()
        for weight in projections(read_moe(Checkpoint(path), 1)).values():
            assert weight.scales is not None and weight.scales.dtype == torch.uint8
            assert weight.scales.nbytes == 4 * 128 * 128 // 32
            scales.append(weight.scales)
        layer = load_layer(path, 1)
        assert isinstance(layer, MoELayer)
        results.append(layer(x))
    assert all(same_bytes(scales[i], scales[i % 3]) for i in range(9))
    assert torch.count_nonzero(results[0])
    assert same_bytes(results[0], results[1]) and same_bytes(results[0], results[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("byte", [0, 1, 127, 134, 254])
def test_a4_every_dtype_means_the_same_power(
    tmp_path: Path, rng: torch.Generator, byte: int, dtype: torch.dtype
) -> None:
    """Byte 0 is the subnormal 2^-127, 134 is 128 and no NaN, 254 is 2^127."""
    tensors = deepseek_tensors(rng)
    codes = torch.zeros(128, 64, dtype=torch.uint8)
    codes[5, :16] = 0x71
    scales = torch.full((128, 4), byte, dtype=torch.uint8)
    tensors[f"{BASE}.weight"] = codes.view(torch.int8)
    tensors[f"{BASE}.scale"] = e8m0_as(scales, dtype)
    up = read_moe(Checkpoint(write(tmp_path, deepseek_config(), tensors)), 1).bank.up
    assert up.scales is not None and up.scales[2].unique().tolist() == [byte]
    assert dequantize(up)[2, 5, :2].tolist() == [0.5 * 2.0 ** (byte - 127), 6 * 2.0 ** (byte - 127)]


@pytest.mark.parametrize(
    "value",
    [120.0, 1.5, 0.0, -1.0, 2.0**-128, float("inf"), float("nan"), 1.0 + 2.0**-23],
)
def test_a5_float32_scales_that_are_no_powers_of_two(
    tmp_path: Path, rng: torch.Generator, value: float
) -> None:
    """120.0 is what casting byte 120 by value gives."""
    tensors = _with_scales(deepseek_tensors(rng), torch.float32)
    tensors[f"{BASE}.scale"][7, 3] = value
    checkpoint = Checkpoint(write(tmp_path, deepseek_config(), tensors))
    place = rf"model\.safetensors: {BASE}\.scale: block scale {value} at row 7, block 3; allowed"
    with pytest.raises(CheckpointError, match=place.replace("+", r"\+")):
        read_moe(checkpoint, 1)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_a4_nan_byte_is_refused(tmp_path: Path, rng: torch.Generator, dtype: torch.dtype) -> None:
    tensors = deepseek_tensors(rng)
    tensors[f"{BASE}.scale"].view(torch.uint8)[7, 3] = 255
    tensors = _with_scales(tensors, dtype)
    checkpoint = Checkpoint(write(tmp_path, deepseek_config(), tensors))
    with pytest.raises(CheckpointError, match=rf"{BASE}\.scale: .*0xFF.*expert 2, row 7, block 3"):
        read_moe(checkpoint, 1)


def test_stacked_scales_name_their_part(tmp_path: Path, rng: torch.Generator) -> None:
    tensors = stack(deepseek_tensors(rng), "layers.1.ffn", DEEPSEEK_WORDS)
    name = "layers.1.ffn.experts.gate_up_proj_scale"
    tensors[name] = e8m0_as(tensors[name], torch.float32)
    tensors[name][2, 128 + 7, 3] = 3.0
    checkpoint = Checkpoint(write(tmp_path, deepseek_config(), tensors))
    place = rf"{name}\[2, 128:256\]: block scale 3.0 at row 7, block 3"
    with pytest.raises(CheckpointError, match=place):
        read_moe(checkpoint, 1)
