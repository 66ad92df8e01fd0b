"""Dense MLPs through torch's matrix products (cuBLAS on an NVIDIA card)."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from exactmoe.bench.peers.peer import fused_swiglu
from exactmoe.bench.timing import Call
from exactmoe.dense import DenseMLP


def build(layer: DenseMLP) -> Callable[[Tensor], Call]:
    """gate and up as one product, SwiGLU as one kernel, down."""
    bank, limit = layer.bank, layer.swiglu_limit
    gate_up = torch.cat([bank.gate.codes[0], bank.up.codes[0]])
    down, swiglu = bank.down.codes[0], fused_swiglu(layer.device.type)
    unlimited = float("inf") if limit is None else limit

    def make(x: Tensor) -> Call:
        return lambda: F.linear(swiglu(F.linear(x, gate_up), unlimited), down)

    return make
