"""FP8 linear layers in checkpoints of tests/hf: codes, scales, and their values."""

import re

import torch

# What DeepSeek-V4 publishes in FP8, besides shared experts; compressors and scorers stay bf16.
ATTENTION = {
    "deepseek_v4": r"\.attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)\.weight$",
    "glm5_next": r"\.self_attn\.(q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj|q_proj"
    r"|k_proj|v_proj)\.weight$",
}
SHARED = r"shared_experts\..*\.weight$"
SUFFIX = {"deepseek_v4": "scale", "glm5_next": "weight_scale_inv"}


def fp8_parts(family, suffix=None):
    """A change of a checkpoint: attention and shared experts in FP8."""

    def change(tensors):
        for pattern in (ATTENTION[family], SHARED):
            assert fp8(tensors, pattern, suffix or SUFFIX[family])

    return change


def fp8(tensors, pattern, suffix):
    """Weights whose name matches, in 128 x 128 blocks of E4M3: scales in `scale` are E8M0, in
    `weight_scale_inv` float32, in `weight_scale` bf16. Returns their names.
    """
    names = [name for name in sorted(tensors) if re.search(pattern, name)]
    for name in names:
        weight = tensors[name].float()
        blocks = [-(-size // 128) for size in weight.shape]
        scales = torch.full(blocks, 2.0**-9)
        scales = scales * 2.0 ** (torch.arange(scales.numel()) % 3).view(blocks)
        if suffix == "weight_scale_inv":
            scales = scales * torch.linspace(1, 1.3, scales.numel()).view(blocks)
        codes = weight / _spread(scales, weight.shape)
        tensors[name] = codes.clamp(-448, 448).to(torch.float8_e4m3fn)
        dtypes = {"scale": torch.float8_e8m0fnu, "weight_scale": torch.bfloat16}
        scales = scales.to(dtypes.get(suffix, torch.float32))
        tensors[f"{name.removesuffix('weight')}{suffix}"] = scales
    return names


def values(tensors, name, suffix):
    """Float64 [N, K] of an FP8 weight."""
    scales = tensors[f"{name.removesuffix('weight')}{suffix}"].double()
    return tensors[name].double() * _spread(scales, tensors[name].shape)


def _spread(scales, shape):
    rows = scales.repeat_interleave(128, 0)[: shape[0]]
    return rows.repeat_interleave(128, 1)[:, : shape[1]]
