"""Cases that show a silu or an exp which differs in its last place.

h is rounded to bf16, so one f32 ulp of silu shows once in 2^16 values. Here u is chosen for each g
so that silu(g) x u lies in the middle of two neighbours in bf16: one ulp decides what h becomes.
"""

import torch
from torch import Tensor

from exactmoe.bank import ExpertBank
from exactmoe.config import MoEConfig, Numerics
from exactmoe.dense import DenseMLP
from exactmoe.formats import PackedWeight
from exactmoe.layer import MoELayer
from exactmoe.proof.batch import Batch, Entry
from exactmoe.proof.numbers import bells, units
from exactmoe.reference.functions import silu32

_INNER, _HIDDEN = 4096, 16
_LOW, _HIGH = -20.0, 30.0
# A float32 is exactly the sum of this many bfloat16.
_PARTS = 3


def _projections(stream: int) -> tuple[Tensor, Tensor, Tensor]:
    """Gate, up [I, H] and down [H, I], bfloat16, for x = (1, 1, 1, 0, ...)."""
    g = (_LOW + (_HIGH - _LOW) * units((_INNER,), stream)).bfloat16()
    silu = silu32(g.float())
    wanted = silu * (1.0 + units((_INNER,), stream + 1))
    middle = (wanted.bfloat16().view(torch.int16).int() << 16 | 0x8000).view(torch.float32)
    u = (middle.double() / silu.double()).float()
    gate, up = (torch.zeros(_INNER, _HIDDEN, dtype=torch.bfloat16) for _ in range(2))
    gate[:, 0] = g
    for part in range(_PARTS):
        up[:, part] = u.bfloat16()
        u = u - up[:, part].float()
    return gate, up, (bells((_HIDDEN, _INNER), stream + 2) / 64.0).bfloat16()


def _x() -> Tensor:
    x = torch.zeros(1, _HIDDEN, dtype=torch.bfloat16)
    x[0, :_PARTS] = 1.0
    return x


def on_ties_dense(stream: int, backend: str) -> tuple[Entry, Batch]:
    """A dense MLP, f32 output."""
    gate, up, down = _projections(stream)
    return Entry("dense", DenseMLP(gate, up, down, backend=backend, output="f32")), Batch(_x())


def on_ties_experts(stream: int, backend: str) -> tuple[Entry, Batch]:
    """The same in one routed expert with weight 1, f32 slot and output."""
    gate, up, down = (PackedWeight("bf16", matrix[None]) for matrix in _projections(stream))
    config = MoEConfig(_HIDDEN, _INNER, 1, 1, numerics=Numerics(slot="f32", output="f32"))
    layer = MoELayer(config, ExpertBank(gate, up, down), backend=backend)
    ids = torch.zeros(1, 1, dtype=torch.int32)
    return Entry("experts", layer), Batch(_x(), expert_ids=ids, weights=torch.ones(1, 1))
