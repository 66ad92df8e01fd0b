"""ExactMoE: the MLP layers of FP4 mixture-of-experts models, with one bit pattern for a token at every width."""

from exactmoe.bank import ExpertBank, Router, quantize_experts
from exactmoe.config import Limits, MoEConfig, Numerics, Placement, RouterConfig
from exactmoe.dense import DenseMLP
from exactmoe.formats import PackedWeight
from exactmoe.layer import MoELayer
from exactmoe.load import load_layer

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
    "quantize_experts",
]
