"""Checkpoints: what a folder holds, where each tensor goes, and the weights of one layer."""

from exactmoe.checkpoint.audit import LoadReport, audit
from exactmoe.checkpoint.header import TensorInfo
from exactmoe.checkpoint.index import Checkpoint
from exactmoe.checkpoint.load import (
    DenseWeights,
    MoEWeights,
    Share,
    read_dense,
    read_layer,
    read_moe,
    shares_of,
)
from exactmoe.checkpoint.plan import LayerPlan, WeightPlan
from exactmoe.checkpoint.planner import plan_layer
from exactmoe.checkpoint.quantize import Quantization
from exactmoe.checkpoint.reader import Progress, Reader

__all__ = [
    "Checkpoint",
    "DenseWeights",
    "LayerPlan",
    "LoadReport",
    "MoEWeights",
    "Progress",
    "Quantization",
    "Reader",
    "Share",
    "TensorInfo",
    "WeightPlan",
    "audit",
    "plan_layer",
    "read_dense",
    "read_layer",
    "read_moe",
    "shares_of",
]
