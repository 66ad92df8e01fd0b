"""Every dialect from both sides: a bf16 projection stored in it, and the values that this means."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from checkpoint_layouts import compressed_from, decode_compressed, decode_plain
from checkpoint_maker import Tensors, decode_modelopt, decode_native
from exactmoe.formats import quantize
from layers import fp8_blocks


@dataclass(frozen=True)
class Storage:
    """A dialect: how a projection bf16 [N, K] is stored, and its true values float64 [N, K].

    `stacked` says what the tensors are called when all experts lie in one: old -> new suffix.
    """

    store: Callable[[str, Tensor], Tensors]
    values: Callable[[Tensors, str], Tensor]
    stacked: Mapping[str, str] = field(default_factory=dict)


def _modelopt(base: str, weight: Tensor) -> Tensors:
    packed = quantize(weight[None], "nvfp4")
    assert packed.scales is not None and packed.global_scale is not None
    return {
        f"{base}.weight": packed.codes[0],
        f"{base}.weight_scale": packed.scales[0].view(torch.float8_e4m3fn),
        f"{base}.weight_scale_2": packed.global_scale[0].clone(),
    }


def _native(base: str, weight: Tensor) -> Tensors:
    packed = quantize(weight[None], "mxfp4")
    assert packed.scales is not None
    return {
        f"{base}.weight": packed.codes[0].view(torch.int8),
        f"{base}.scale": packed.scales[0].view(torch.float8_e8m0fnu),
    }


def _compressed_mxfp4(base: str, weight: Tensor) -> Tensors:
    codes, scales = _native(base, weight).values()
    names = (f"{base}.weight_packed", f"{base}.weight_scale")
    return dict(zip(names, (codes.view(torch.uint8), scales.view(torch.uint8)), strict=True))


def _decode_compressed_mxfp4(tensors: Tensors, base: str) -> Tensor:
    codes, scales = tensors[f"{base}.weight_packed"], tensors[f"{base}.weight_scale"]
    return decode_native({".weight": codes, ".scale": scales}, "")


def _fp8(suffix: str, dtype: torch.dtype) -> Storage:
    """Blocks of 128 x 128 with float32 scales, or such as E8M0 and bf16 can hold."""

    def store(base: str, weight: Tensor) -> Tensors:
        packed = fp8_blocks(weight[None])
        assert packed.scales is not None
        scales = packed.scales[0]
        if dtype != torch.float32:
            scales = torch.exp2(scales.log2().ceil())
        spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        codes = (weight.float() / spread[: len(weight), : weight.shape[1]]).to(torch.float8_e4m3fn)
        return {f"{base}.weight": codes, f"{base}.{suffix}": scales.to(dtype)}

    def values(tensors: Tensors, base: str) -> Tensor:
        codes, scales = tensors[f"{base}.weight"].double(), tensors[f"{base}.{suffix}"].double()
        spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return codes * spread[: codes.shape[0], : codes.shape[1]]

    return Storage(store, values)


def _plain(dtype: torch.dtype, stacked: Mapping[str, str]) -> Storage:
    return Storage(lambda base, w: {f"{base}.weight": w.to(dtype)}, decode_plain, stacked)


# By the names of exactmoe.checkpoint.dialects, and F32, which routers may have.
STORAGES = {
    "ModelOpt NVFP4": Storage(_modelopt, decode_modelopt),
    "compressed-tensors NVFP4": Storage(compressed_from, decode_compressed),
    "compressed-tensors MXFP4": Storage(_compressed_mxfp4, _decode_compressed_mxfp4),
    "DeepSeek MXFP4": Storage(_native, decode_native),
    "FP8 128x128 with weight_scale_inv": _fp8("weight_scale_inv", torch.float32),
    "FP8 128x128 with scale": _fp8("scale", torch.float8_e8m0fnu),
    "FP8 128x128 with weight_scale": _fp8("weight_scale", torch.bfloat16),
    "BF16": _plain(torch.bfloat16, {}),
    "F32": _plain(torch.float32, {}),
    "stacked NVFP4": Storage(
        _modelopt,
        decode_modelopt,
        {".weight": "", ".weight_scale": "_scale", ".weight_scale_2": "_scale_2"},
    ),
    "stacked MXFP4": Storage(_native, decode_native, {".weight": "", ".scale": "_scale"}),
    "stacked BF16": _plain(torch.bfloat16, {".weight": ""}),
    # Only its names matter: they are refused.
    "gpt-oss MXFP4": Storage(_native, decode_native, {".weight": "_blocks", ".scale": "_scales"}),
}
