"""Layers made on their device from random bytes: quick at the sizes of real models."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from exactmoe import (
    DenseMLP,
    ExpertBank,
    Limits,
    MoEConfig,
    MoELayer,
    Numerics,
    PackedWeight,
    Router,
    RouterConfig,
)
from exactmoe.formats import BLOCK

VOCABULARY = 64


def generator(device: str, seed: int = 1) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def packed(rng: torch.Generator, format: str, *shape: int) -> PackedWeight:
    """A weight [E, N, K] whose values are about 1 / sqrt(K); "nvfp4-divide" stores the reciprocal
    of the global scale.
    """
    experts, rows, columns = shape
    device, size = rng.device, columns**-0.5

    def integers(low: int, high: int, *sizes: int) -> Tensor:
        return torch.randint(low, high, sizes, generator=rng, device=device, dtype=torch.uint8)

    if format == "bf16":
        values = torch.randn(shape, generator=rng, device=device) * size
        return PackedWeight("bf16", values.bfloat16())
    if format == "fp8":
        codes = integers(0, 256, *shape)
        codes = torch.where(codes & 0x7F == 0x7F, codes - 1, codes)
        scales = torch.rand(
            experts, -(-rows // 128), -(-columns // 128), generator=rng, device=device
        )
        return PackedWeight("fp8", codes, (0.5 + scales) * (size / 113))
    codes = integers(0, 256, experts, rows, columns // 2)
    blocks = (experts, rows, columns // BLOCK[format.removesuffix("-divide")])
    if format == "mxfp4":
        exponent = 127 - 2 - round(columns.bit_length() / 2)
        return PackedWeight("mxfp4", codes, integers(exponent - 2, exponent + 2, *blocks))
    factor = (0.5 + torch.rand(experts, generator=rng, device=device)) * (size / 3)
    scales = integers(0x30, 0x40, *blocks)  # 0.5 ... 1.875
    if format == "nvfp4-divide":
        return PackedWeight("nvfp4", codes, scales, 1 / factor, "divide")
    return PackedWeight("nvfp4", codes, scales, factor)


@dataclass(frozen=True)
class Layer:
    """What a whole layer is made of."""

    format: str = "nvfp4"
    numerics: Numerics | str = "a16"
    hidden: int = 256
    inner: int = 256
    experts: int = 16
    top_k: int = 4
    hashed: bool = False
    shared: str | None = "bf16"
    limit: float | None = 10.0
    max_rows: int = 512

    def build(self, device: str, backend: str = "auto", seed: int = 1) -> MoELayer:
        rng = generator(device, seed)
        hidden, inner, experts = self.hidden, self.inner, self.experts
        bank = ExpertBank(
            packed(rng, self.format, experts, inner, hidden),
            packed(rng, self.format, experts, inner, hidden),
            packed(rng, self.format, experts, hidden, inner),
        )
        config = MoEConfig(hidden, inner, experts, self.top_k, self.limit, self.numerics)
        shared = None
        if self.shared is not None:
            shared = dense(rng, self.shared, hidden, inner, backend, self.limit)
        return MoELayer(
            config,
            bank,
            self.router(rng),
            shared,
            limits=Limits(max_rows=self.max_rows),
            backend=backend,
        )

    def router(self, rng: torch.Generator) -> Router:
        device, experts = rng.device, self.experts
        weight = torch.randn(experts, self.hidden, generator=rng, device=device)
        bias, table = None, None
        if self.hashed:
            chances = torch.rand(VOCABULARY, experts, generator=rng, device=device)
            table = chances.argsort(-1)[:, : self.top_k].contiguous()
        else:
            bias = torch.rand(experts, generator=rng, device=device)
        score = "sqrt_softplus" if self.hashed else "sigmoid"
        return Router(
            (weight * self.hidden**-0.5).bfloat16(),
            bias,
            table,
            config=RouterConfig(score, factor=2.5),
        )

    def changed(self, **fields: Any) -> "Layer":
        return replace(self, **fields)


def dense(
    rng: torch.Generator,
    format: str,
    hidden: int,
    inner: int,
    backend: str = "auto",
    limit: float | None = 10.0,
) -> DenseMLP:
    gate, up = (packed(rng, format, 1, inner, hidden) for _ in range(2))
    return DenseMLP(gate, up, packed(rng, format, 1, hidden, inner), limit, backend=backend)


def call(
    layer: MoELayer, tokens: int, seed: int = 2, ids: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """x, distinct expert ids int32 and positive weights of a call."""
    device, config = layer.device, layer.config
    rng = torch.Generator(device).manual_seed(seed)
    x = torch.randn(tokens, config.hidden_size, generator=rng, device=device).bfloat16()
    if ids is None:
        chances = torch.rand(tokens, config.num_experts, generator=rng, device=device)
        ids = chances.argsort(-1)[:, : config.top_k].int().contiguous()
    weights = torch.rand(tokens, config.top_k, generator=rng, device=device) + 0.1
    return x, ids, weights


def token_ids(layer: MoELayer, tokens: int, seed: int = 3) -> Tensor | None:
    """Of a hash layer."""
    if layer.router is None or layer.router.table is None:
        return None
    rng = torch.Generator(layer.device).manual_seed(seed)
    return torch.randint(VOCABULARY, (tokens,), generator=rng, device=layer.device)
