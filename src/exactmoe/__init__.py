"""ExactMoE: the MLP layers of FP4 mixture-of-experts models, with one bit pattern for a token at every width."""

from exactmoe.bank import ExpertBank, Router, quantize_experts
from exactmoe.config import Limits, MoEConfig, Numerics, Placement, RouterConfig
from exactmoe.formats import PackedWeight
from exactmoe.layer import DenseMLP, MoELayer

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
    "quantize_experts",
]
