"""Quantisers: bf16 or f32 weights to NVFP4 and MXFP4 bytes, by named published rules."""

from collections.abc import Callable

import torch
from torch import Tensor

from exactmoe.errors import ConfigError
from exactmoe.formats import e2m1
from exactmoe.formats.packed import BLOCK, PackedWeight, require_columns
from exactmoe.formats.scales import (
    E4M3_MAX,
    E8M0_BIAS,
    decode_e4m3,
    encode_e4m3,
    floor_log2,
    power_of_two,
)

NVFP4_RULES = ("modelopt", "four_over_six")
MXFP4_RULES = ("ocp", "no_clip")


def quantize_nvfp4(weight: Tensor, rule: str = "modelopt") -> PackedWeight:
    """Quantise weights [E, N, K] (bf16 or f32) to NVFP4, each expert on its own.

    Rule "modelopt" (NVIDIA Model Optimizer): global = amax / 2688 of the expert (1 where that is
    0 in float32); block scale = nearest E4M3 of amax / 6 / global; code = nearest E2M1 of
    w / (block scale x global), ties to the even code, saturating.
    Rule "four_over_six": the same, and each block also tries amax / 4 and keeps the smaller squared
    error.

    Raises:
        ConfigError: another rule, dtype or rank; a value that is not finite (named by expert, row
            and column).
        Unsupported: K is not a multiple of 16.
    """
    _require_rule(rule, NVFP4_RULES)
    blocks = _checked_blocks(weight, "nvfp4")
    global_scale = blocks.abs().amax((1, 2, 3)) / (e2m1.MAX * E4M3_MAX)
    global_scale = global_scale.masked_fill(global_scale == 0, 1.0)
    factor = global_scale[:, None, None]
    block_amax = blocks.abs().amax(-1)
    scales, codes = _nvfp4_blocks(blocks, block_amax / e2m1.MAX / factor, factor)
    if rule == "four_over_six":
        other_scales, other_codes = _nvfp4_blocks(blocks, block_amax / 4.0 / factor, factor)
        other_error = _error(blocks, other_scales, other_codes, factor)
        better = other_error < _error(blocks, scales, codes, factor)
        scales = torch.where(better, other_scales, scales)
        codes = torch.where(better[..., None], other_codes, codes)
    return PackedWeight("nvfp4", e2m1.pack(codes.flatten(-2)), scales, global_scale)


def quantize_mxfp4(weight: Tensor, rule: str = "ocp") -> PackedWeight:
    """Quantise weights [E, N, K] (bf16 or f32) to MXFP4.

    Rule "ocp" (OCP Microscaling v1.0, section 6.3): exponent = floor(log2(amax)) - 2 of each block
    of 32; values above 6 x 2^exponent saturate. Rule "no_clip": one exponent more where the largest
    value is above 6 x 2^exponent, so that nothing saturates. A block of zeros gets byte 0.

    Raises:
        ConfigError: another rule, dtype or rank; a value that is not finite (named by expert, row
            and column).
        Unsupported: K is not a multiple of 32.
    """
    _require_rule(rule, MXFP4_RULES)
    blocks = _checked_blocks(weight, "mxfp4")
    amax = blocks.abs().amax(-1)
    exponents = floor_log2(torch.where(amax > 0, amax, torch.ones_like(amax))) - 2
    if rule == "no_clip":
        exponents = exponents + (amax > e2m1.MAX * power_of_two(exponents)).int()
    exponents = exponents.clamp(-E8M0_BIAS, E8M0_BIAS).masked_fill(amax == 0, -E8M0_BIAS)
    codes = e2m1.encode((blocks.double() / power_of_two(exponents).double()[..., None]).float())
    return PackedWeight(
        "mxfp4", e2m1.pack(codes.flatten(-2)), (exponents + E8M0_BIAS).to(torch.uint8)
    )


def quantize(weight: Tensor, format: str, rule: str | None = None) -> PackedWeight:
    """Quantise weights [E, N, K] to "nvfp4" or "mxfp4", by its first rule unless one is named."""
    quantizers: dict[str, Callable[..., PackedWeight]] = {
        "nvfp4": quantize_nvfp4,
        "mxfp4": quantize_mxfp4,
    }
    if format not in quantizers:
        raise ConfigError(f"format is {format!r}; allowed: {', '.join(quantizers)}")
    return quantizers[format](weight) if rule is None else quantizers[format](weight, rule)


def _require_rule(rule: str, allowed: tuple[str, ...]) -> None:
    if rule not in allowed:
        raise ConfigError(f"rule is {rule!r}; allowed: {', '.join(allowed)}")


def _checked_blocks(weight: Tensor, format: str) -> Tensor:
    """The weight as float32 [E, N, K // block, block]."""
    if weight.dtype not in (torch.bfloat16, torch.float32) or weight.ndim != 3:
        found = f"{weight.dtype} {tuple(weight.shape)}"
        raise ConfigError(f"weight is {found}; allowed: bfloat16 or float32 [E, N, K]")
    if weight.numel() == 0:
        raise ConfigError(f"weight has shape {tuple(weight.shape)}; allowed: no empty dimension")
    require_columns(format, weight.shape[-1])
    bad = ~torch.isfinite(weight)
    if bool(bad.any()):
        expert, row, column = (int(i) for i in bad.nonzero()[0])
        value = float(weight[expert, row, column])
        place = f"expert {expert}, row {row}, column {column}"
        raise ConfigError(f"weight is {value} at {place}; allowed: finite values")
    return weight.float().unflatten(-1, (-1, BLOCK[format]))


def _nvfp4_blocks(blocks: Tensor, wanted: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 scale bytes [E, N, K // 16] nearest to `wanted`, and codes [E, N, K // 16, 16]."""
    scales = encode_e4m3(wanted)
    step = (decode_e4m3(scales) * global_scale)[..., None]
    # A block scale that rounds to zero leaves zeros, with their signs.
    scaled = torch.where(step > 0, blocks / step, torch.copysign(torch.zeros_like(blocks), blocks))
    return scales, e2m1.encode(scaled)


def _error(blocks: Tensor, scales: Tensor, codes: Tensor, global_scale: Tensor) -> Tensor:
    """Squared error of each block; the decoded values are exact in float64."""
    step = (decode_e4m3(scales).double() * global_scale.double())[..., None]
    return (e2m1.decode(codes).double() * step - blocks.double()).square().sum(-1)
