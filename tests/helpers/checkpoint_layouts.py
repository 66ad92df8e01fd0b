"""Small checkpoints in every further layout, decoded here from the stored tensors alone."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from checkpoint_maker import (
    E2M1,
    Tensors,
    bf16,
    decode_modelopt,
    deepseek_config,
    deepseek_tensors,
    glm_config,
    glm_tensors,
    modelopt,
    native,
    plain,
)
from exactmoe.checkpoint import DenseWeights, MoEWeights
from exactmoe.formats import PackedWeight

GLM_BLOCK = "model.language_model.layers.1.mlp"
GLM_WORDS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
DEEPSEEK_WORDS = {"gate": "w1", "up": "w3", "down": "w2"}
# N and K of the routed experts of glm_config() and deepseek_config().
GLM_SIZES = {"gate": (32, 64), "up": (32, 64), "down": (64, 32)}
DEEPSEEK_SIZES = dict.fromkeys(DEEPSEEK_WORDS, (128, 128))


def same_bytes(found: Tensor, expected: Tensor) -> bool:
    """Shapes and bytes are equal; dtypes may differ."""

    def raw(tensor: Tensor) -> bytes:
        return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

    return found.shape == expected.shape and raw(found) == raw(expected)


def projections(weights: MoEWeights | DenseWeights) -> dict[str, PackedWeight]:
    owner = weights.bank if isinstance(weights, MoEWeights) else weights
    return {"gate": owner.gate, "up": owner.up, "down": owner.down}


def compressed(
    rng: torch.Generator, base: str, rows: int, columns: int, divisor: Tensor
) -> Tensors:
    """One projection as compressed-tensors writes it, every code byte and legal block scale."""
    packed = modelopt(rng, base, rows, columns, divisor)
    return {
        f"{base}.weight_packed": packed[f"{base}.weight"],
        f"{base}.weight_scale": packed[f"{base}.weight_scale"],
        f"{base}.weight_global_scale": divisor,
    }


def compressed_from(base: str, weight: Tensor) -> Tensors:
    """A weight [N, K] quantised as compressed-tensors does it: the divisor is 2688 / amax."""
    blocks = weight.double().unflatten(-1, (-1, 16))
    divisor = (2688.0 / blocks.abs().max()).float()
    scales = (blocks.abs().amax(-1) / 6 * divisor.double()).float().to(torch.float8_e4m3fn)
    scaled = blocks * divisor.double() / scales.double()[..., None]
    codes = (scaled[..., None] - E2M1[:8].abs() * scaled.sign()[..., None]).abs().argmin(-1)
    codes = (codes + 8 * (scaled < 0)).flatten(-2).to(torch.uint8)
    return {
        f"{base}.weight_packed": codes[:, 0::2] + 16 * codes[:, 1::2],
        f"{base}.weight_scale": scales,
        f"{base}.weight_global_scale": divisor.reshape(1),
    }


def decode_compressed(tensors: Tensors, base: str) -> Tensor:
    """True values float64 [N, K], from the checkpoint's tensors alone."""
    divisor = tensors[f"{base}.weight_global_scale"].double()
    return decode_modelopt(
        {
            ".weight": tensors[f"{base}.weight_packed"],
            ".weight_scale": tensors[f"{base}.weight_scale"],
            ".weight_scale_2": torch.ones(()),
        },
        "",
    ).div(divisor)


def decode_plain(tensors: Tensors, base: str) -> Tensor:
    return tensors[f"{base}.weight"].double()


def fp8(rng: torch.Generator, base: str, rows: int, columns: int, suffix: str) -> Tensors:
    """One projection in E4M3 with a scale per 128 x 128 block: float32, E8M0 or bf16."""
    codes = torch.randint(0, 127, (rows, columns), generator=rng).to(torch.uint8)
    scales = torch.rand(-(-rows // 128), -(-columns // 128), generator=rng) + 0.5
    if suffix == "weight_scale":
        scales = scales.bfloat16()
    if suffix == "scale":
        scales = torch.full(scales.shape, 120, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    return {f"{base}.weight": codes.view(torch.float8_e4m3fn), f"{base}.{suffix}": scales}


def e8m0_as(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """E8M0 scales as they are published: bytes, F8_E8M0, or the float32 that they mean."""
    codes = scales.view(torch.uint8)
    if dtype == torch.float32:
        return torch.pow(2.0, codes.double() - 127).float()
    return codes.view(dtype)


def with_experts(
    tensors: Tensors,
    block: str,
    words: Mapping[str, str],
    make: Callable[[str, str, int], Tensors],
) -> Tensors:
    """The tensors with other routed experts in a block: make(base, projection, expert)."""
    kept = {n: t for n, t in tensors.items() if not n.startswith(f"{block}.experts.")}
    for projection, word in words.items():
        for expert in range(4):
            kept |= make(f"{block}.experts.{expert}.{word}", projection, expert)
    return kept


def compressed_tensors(rng: torch.Generator) -> Tensors:
    """glm_tensors() with experts of compressed-tensors, divisors () and [1], W4A4 leftovers."""

    def make(base: str, projection: str, expert: int) -> Tensors:
        divisor = torch.rand(1 if expert % 2 else (), generator=rng) * 3000 + 100
        made = compressed(rng, base, *GLM_SIZES[projection], divisor)
        return made | {f"{base}.input_global_scale": torch.tensor([7.0])}

    return with_experts(glm_tensors(rng), GLM_BLOCK, GLM_WORDS, make)


def hybrid_config() -> dict[str, Any]:
    """NVIDIA's DeepSeek-V4: the config claims fp8, and only one more word says NVFP4."""
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    quantization |= {"scale_fmt": "ue8m0", "moe_quant_algo": "NVFP4"}
    return deepseek_config(quantization_config=quantization, expert_dtype="fp4")


def hybrid_tensors(rng: torch.Generator) -> Tensors:
    """deepseek_tensors() with ModelOpt experts; gate and up share a global scale."""
    tensors = deepseek_tensors(rng)
    for layer in (0, 1):
        shared = [torch.rand((), generator=rng) + 1e-3 for _ in range(4)]

        def make(base: str, projection: str, expert: int, scales: list[Tensor] = shared) -> Tensors:
            made = modelopt(rng, base, 128, 128, scales[expert].clone())
            return made | {f"{base}.input_scale": torch.tensor(0.5)}

        tensors = with_experts(tensors, f"layers.{layer}.ffn", DEEPSEEK_WORDS, make)
    return tensors


def stack(tensors: Tensors, block: str, words: Mapping[str, str]) -> Tensors:
    """The experts of a block stacked: gate_up_proj (gate first) and down_proj."""
    prefix = f"{block}.experts."
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}
    suffixes = {".weight": "", ".weight_scale": "_scale", ".scale": "_scale"}
    suffixes |= {".weight_scale_2": "_scale_2", ".input_scale": "_input_scale"}
    for group, names in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
        for suffix, stacked in suffixes.items():
            bases = [[f"{prefix}{e}.{words[name]}{suffix}" for name in names] for e in range(4)]
            if bases[0][0] not in tensors:
                continue
            parts = [torch.cat([_raw(tensors[name]) for name in row]) for row in bases]
            dtype = tensors[bases[0][0]].dtype
            kept[f"{prefix}{group}{stacked}"] = torch.stack(parts).view(dtype)
    return kept


def _raw(tensor: Tensor) -> Tensor:
    """Bytes of one-byte dtypes, which torch would not join; a scalar as [1]."""
    raw = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
    return raw.reshape(1) if raw.ndim == 0 else raw


def glm_bf16_tensors(rng: torch.Generator) -> Tensors:
    """glm_tensors() with BF16 experts."""

    def make(base: str, projection: str, expert: int) -> Tensors:
        return plain(rng, base, *GLM_SIZES[projection])

    return with_experts(glm_tensors(rng), GLM_BLOCK, GLM_WORDS, make)


def glm_mtp_tensors(
    rng: torch.Generator, make: Callable[[str, str, int], Tensors], layer: int = 2
) -> Tensors:
    """glm_tensors() with a whole multi-token prediction layer after the last."""
    block = f"model.language_model.layers.{layer}.mlp"
    tensors = with_experts(glm_tensors(rng), block, GLM_WORDS, make)
    for projection, word in GLM_WORDS.items():
        tensors |= plain(rng, f"{block}.shared_experts.{word}", *GLM_SIZES[projection])
    tensors[f"{block}.gate.weight"] = bf16(rng, 4, 64)
    tensors[f"{block}.gate.e_score_correction_bias"] = torch.randn(4, generator=rng)
    return tensors


def deepseek_mtp_tensors(rng: torch.Generator, blocks: int, prefix: str = "") -> Tensors:
    """deepseek_tensors() with whole blocks of multi-token prediction, native MXFP4."""
    tensors = deepseek_tensors(rng, prefix)
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}
    for number in range(blocks):
        block = f"{prefix}mtp.{number}.ffn"
        tensors = with_experts(
            tensors, block, DEEPSEEK_WORDS, lambda base, p, e: native(rng, base, 128, 128)
        )
        for word in DEEPSEEK_WORDS.values():
            tensors |= plain(rng, f"{block}.shared_experts.{word}", 128, 128)
        tensors[f"{block}.gate.weight"] = bf16(rng, 4, 128)
        tensors[f"{block}.gate.bias"] = torch.randn(4, generator=rng)
        tensors[f"{prefix}mtp.{number}.enorm.weight"] = bf16(rng, 128)
    return tensors


Layout = tuple[dict[str, Any], Tensors]
LAYOUTS: dict[str, Callable[[torch.Generator], Layout]] = {
    "compressed-tensors": lambda rng: (glm_config(), compressed_tensors(rng)),
    "NVIDIA DeepSeek-V4": lambda rng: (hybrid_config(), hybrid_tensors(rng)),
    "stacked NVFP4": lambda rng: (glm_config(), stack(glm_tensors(rng), GLM_BLOCK, GLM_WORDS)),
    "stacked MXFP4": lambda rng: (
        deepseek_config(),
        stack(deepseek_tensors(rng), "layers.1.ffn", DEEPSEEK_WORDS),
    ),
    "stacked BF16": lambda rng: (
        glm_config(),
        stack(glm_bf16_tensors(rng), GLM_BLOCK, GLM_WORDS),
    ),
}


def truth(
    x: Tensor, ids: Tensor, weights: Tensor, values: Mapping[str, Tensor], limit: float
) -> Tensor:
    """Routed experts in float64: x [T, H], ids and weights [T, K] -> [T, H]."""
    y = torch.zeros(x.shape, dtype=torch.float64)
    for token, slot in ((t, k) for t in range(ids.shape[0]) for k in range(ids.shape[1])):
        expert = int(ids[token, slot])
        gate = (values["gate"][expert] @ x[token].double()).clamp(max=limit)
        up = (values["up"][expert] @ x[token].double()).clamp(-limit, limit)
        h = torch.nn.functional.silu(gate) * up
        y[token] += weights[token, slot].double() * (values["down"][expert] @ h)
    return y


def decoded(
    tensors: Tensors, block: str, words: Mapping[str, str], decode: Callable[[Tensors, str], Tensor]
) -> dict[str, Tensor]:
    """True values float64 [E, N, K] of the experts of a block."""
    return {
        name: torch.stack([decode(tensors, f"{block}.experts.{e}.{word}") for e in range(4)])
        for name, word in words.items()
    }
