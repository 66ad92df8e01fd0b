"""The definition: what every kernel must compute, as plain loops on the CPU (docs/numerics.md,
contract version 1).
"""

from exactmoe.reference.combine import combine, finish
from exactmoe.reference.dense_mlp import dense_gate_up, dense_linear, dense_mlp
from exactmoe.reference.dot import dot, dot_blocks, dot_dense, dot_router, dot_scaled
from exactmoe.reference.experts import as_rows, down, expert_slots, gate_up, project
from exactmoe.reference.quantize import quantize
from exactmoe.reference.router import (
    hash_router,
    look_up,
    router,
    router_logits,
    routing_weights,
    select,
)

__all__ = [
    "as_rows",
    "combine",
    "dense_gate_up",
    "dense_linear",
    "dense_mlp",
    "dot",
    "dot_blocks",
    "dot_dense",
    "dot_router",
    "dot_scaled",
    "down",
    "expert_slots",
    "finish",
    "gate_up",
    "hash_router",
    "look_up",
    "project",
    "quantize",
    "router",
    "router_logits",
    "routing_weights",
    "select",
]
