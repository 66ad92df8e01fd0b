"""ExactMoE: MLP layers of FP4 mixture-of-experts models, one bit pattern per token at every width.

A name is imported when it is first used: torch, and transformers for `load_model`, take seconds,
and the command line has to stand before they come.
"""

import importlib
from typing import TYPE_CHECKING, Any

from exactmoe import errors as errors

if TYPE_CHECKING:
    from exactmoe.bank import ExpertBank, Partition, Router, quantize_experts
    from exactmoe.config import Limits, MoEConfig, Numerics, Placement, RouterConfig
    from exactmoe.dense import DenseMLP
    from exactmoe.formats import PackedWeight
    from exactmoe.hf import load_model
    from exactmoe.layer import MoELayer
    from exactmoe.linear import DenseLinear
    from exactmoe.load import load_layer
    from exactmoe.parallel.rank_wire import RankPlacement, RankWire
    from exactmoe.parallel.ranks import Ranks
    from exactmoe.proof.verify import verify
    from exactmoe.ranked import RankedLayer
    from exactmoe.ranked_dense import RankedDense
    from exactmoe.report.profile import profile

__all__ = [
    "DenseLinear",
    "DenseMLP",
    "ExpertBank",
    "Limits",
    "MoEConfig",
    "MoELayer",
    "Numerics",
    "PackedWeight",
    "Partition",
    "Placement",
    "RankPlacement",
    "RankWire",
    "RankedDense",
    "RankedLayer",
    "Ranks",
    "Router",
    "RouterConfig",
    "load_layer",
    "load_model",
    "profile",
    "quantize_experts",
    "verify",
]

_HOMES = {
    "bank": ("ExpertBank", "Partition", "Router", "quantize_experts"),
    "config": ("Limits", "MoEConfig", "Numerics", "Placement", "RouterConfig"),
    "dense": ("DenseMLP",),
    "formats": ("PackedWeight",),
    "hf": ("load_model",),
    "layer": ("MoELayer",),
    "linear": ("DenseLinear",),
    "load": ("load_layer",),
    "parallel.rank_wire": ("RankPlacement", "RankWire"),
    "parallel.ranks": ("Ranks",),
    "proof": ("verify",),
    "ranked": ("RankedLayer",),
    "ranked_dense": ("RankedDense",),
    "report.profile": ("profile",),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'exactmoe' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
