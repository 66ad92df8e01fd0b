"""RouterTensors: what a router op reads (ops/path.py), without a bank's module."""

from dataclasses import dataclass

import torch
from torch import Tensor

from exactmoe.config import RouterConfig


@dataclass
class RouterTensors:
    """weight bfloat16 or float32 [E, H], bias float32 [E], table int64 [V, K]."""

    weight: Tensor | None
    bias: Tensor | None
    table: Tensor | None
    config: RouterConfig

    @property
    def weight_f32(self) -> Tensor:
        assert self.weight is not None
        return self.weight.float()

    @property
    def weight_bf16(self) -> Tensor | None:
        assert self.weight is not None
        return self.weight if self.weight.dtype == torch.bfloat16 else None

    def on(self, device: str) -> "RouterTensors":
        """A copy on a device."""
        parts = (self.weight, self.bias, self.table)
        return RouterTensors(*(None if p is None else p.to(device) for p in parts), self.config)
