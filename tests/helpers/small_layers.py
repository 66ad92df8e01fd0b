"""Small whole layers: router, experts, shared expert."""

import torch

from exactmoe import DenseMLP, MoEConfig, MoELayer, Router, RouterConfig
from layers import normal, random_bank

EXPERTS, TOP_K, VOCABULARY = 8, 2, 20


def small_layer(rng, kind="score", numerics="a16", format="nvfp4", backend="cpu"):
    """A MoELayer with a shared expert. kind: "score", "hash", or "bare" (no router, no shared)."""
    size = 128 if numerics == "a8" else 64
    bank = random_bank(rng, format, EXPERTS, size, size)
    router, shared = None, None
    if kind != "bare":
        rows = [torch.randperm(EXPERTS, generator=rng)[:TOP_K] for _ in range(VOCABULARY)]
        router = Router(
            normal(rng, EXPERTS, size, scale=size**-0.5),
            bias=torch.rand(EXPERTS, generator=rng) if kind == "score" else None,
            table=torch.stack(rows) if kind == "hash" else None,
            config=RouterConfig("sigmoid" if kind == "score" else "sqrt_softplus", factor=2.5),
        )
        shared = small_dense(rng, size, backend)
    config = MoEConfig(size, size, EXPERTS, TOP_K, swiglu_limit=10.0, numerics=numerics)
    return MoELayer(config, bank, router=router, shared=shared, backend=backend)


def small_dense(rng, size=64, backend="cpu"):
    """A bf16 DenseMLP."""
    gate, up, down = (normal(rng, size, size, scale=size**-0.5) for _ in range(3))
    return DenseMLP(gate, up, down, swiglu_limit=10.0, backend=backend)
