"""ExactMoE: MLP layers of FP4 mixture-of-experts models, one bit pattern per token at every width.

`load_model` brings in transformers, so it is imported only when it is used.
"""

from typing import Any

from exactmoe.bank import ExpertBank, Router, quantize_experts
from exactmoe.config import Limits, MoEConfig, Numerics, Placement, RouterConfig
from exactmoe.dense import DenseMLP
from exactmoe.formats import PackedWeight
from exactmoe.layer import MoELayer
from exactmoe.load import load_layer
from exactmoe.proof import verify

__all__ = [
    "DenseMLP",
    "ExpertBank",
    "Limits",
    "MoEConfig",
    "MoELayer",
    "Numerics",
    "PackedWeight",
    "Placement",
    "Router",
    "RouterConfig",
    "load_layer",
    "load_model",
    "quantize_experts",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name == "load_model":
        from exactmoe.hf import load_model

        return load_model
    raise AttributeError(f"module 'exactmoe' has no attribute {name!r}")
