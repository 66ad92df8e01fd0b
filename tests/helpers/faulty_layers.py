"""Layers with one planted fault each, for tests of what finds them."""

import torch
from torch import Tensor

from exactmoe import MoELayer
from exactmoe.dense import DenseMLP
from exactmoe.runtime.workspace import arena

ELEMENT = 5


def flip(y: Tensor, rows: slice = slice(None)) -> Tensor:
    """The lowest bit of one element of some rows turned over."""
    raw = y.view(torch.int16 if y.dtype == torch.bfloat16 else torch.int32)
    raw[rows, ELEMENT] ^= 1
    return y


class Fault:
    """A way to go wrong: `before` may change the inputs, `after` the result."""

    def __init__(self) -> None:
        self.calls = 0

    def before(self, layer, x: Tensor, ids: Tensor | None) -> Tensor:
        return x

    def after(self, layer, x: Tensor, ids: Tensor | None, y: Tensor) -> Tensor:
        return y


class Width(Fault):
    """Above eight tokens another kernel runs."""

    def after(self, layer, x, ids, y):
        return flip(y) if x.shape[0] > 8 else y


class Position(Fault):
    """The ninth token and all later ones are in another tile."""

    def after(self, layer, x, ids, y):
        return flip(y, slice(8, None))


class OneScaleForAll(Fault):
    """One activation scale for the whole tensor: amax over the batch."""

    def before(self, layer, x, ids):
        if not x.numel():
            return x
        step = x.float().abs().amax() / 127
        return (torch.round(x.float() / step) * step).bfloat16()


class LeakingNan(Fault):
    """0 x the sum over all tokens: nothing, unless one of them is NaN or Inf."""

    def after(self, layer, x, ids, y):
        return (y.float() + 0 * x.float().sum(0, keepdim=True).sum()).to(y.dtype)


class ForeignNan(Fault):
    """A NaN of other bits in later tokens; as values the rows are equal to the eye."""

    def after(self, layer, x, ids, y):
        rows = y[8:]
        raw = rows.view(torch.int16)
        raw[rows.isnan()] |= 1
        return y


class MinusZero(Fault):
    """-0 for +0 in later tokens; == calls them equal."""

    def after(self, layer, x, ids, y):
        y[:, ELEMENT] = 0.0
        y[8:, ELEMENT] = -0.0
        return y


class PairOrder(Fault):
    """The first pair of a row is treated otherwise."""

    def after(self, layer, x, ids, y):
        if ids is not None:
            raw = y.view(torch.int16)
            raw[:, ELEMENT] ^= (ids[:, 0] & 1).to(torch.int16)
        return y


class Repeat(Fault):
    """One call in eleven comes out otherwise."""

    def after(self, layer, x, ids, y):
        self.calls += 1
        return flip(y) if self.calls % 11 == 0 else y


class OldWorkspace(Fault):
    """A row that this call did not write is read: 0 x what was there."""

    def before(self, layer, x, ids):
        held = arena(layer.device)
        rest = held._buffer[-4096:].view(torch.float32)
        self.old = (0 * rest).sum()
        return x

    def after(self, layer, x, ids, y):
        return (y.float() + self.old).to(y.dtype)


class ResultInWorkspace(Fault):
    """y is a view of the workspace, so that the next call overwrites it."""

    def after(self, layer, x, ids, y):
        held = arena(layer.device)
        place = held._buffer[: y.nbytes].view(y.dtype).view(y.shape)
        return place.copy_(y)


class UnwrittenRow(Fault):
    """The last row is left as the allocator gave it."""

    def after(self, layer, x, ids, y):
        if y.shape[0]:
            y[-1] = torch.empty(y.shape[1], dtype=y.dtype)
        return y


class Piece(Fault):
    """Calls that are cut into pieces come out otherwise."""

    def after(self, layer, x, ids, y):
        return flip(y) if x.shape[0] > layer.limits.max_rows else y


class Stride(Fault):
    """x is read as if its rows were dense."""

    def before(self, layer, x, ids):
        return x.as_strided(x.shape, (x.shape[1], 1))


class Threads(Fault):
    """Three threads share the work in another way."""

    def after(self, layer, x, ids, y):
        return flip(y) if torch.get_num_threads() == 3 else y


class Backend(Fault):
    """The CPU backend has other bits than the reference."""

    def after(self, layer, x, ids, y):
        return flip(y) if layer.plan().backend == "cpu" else y


class WritesInputs(Fault):
    """x is used as scratch memory."""

    def after(self, layer, x, ids, y):
        if x.numel():
            x[0, ELEMENT] += 1
        return y


class OddChunk(Fault):
    """A call of exactly 44 tokens, a width that is in no list, comes out otherwise."""

    def after(self, layer, x, ids, y):
        return flip(y) if x.shape[0] == 44 else y


class FaultyMoE(MoELayer):
    """A MoELayer with a fault in both of its entries."""

    planted: Fault

    def forward(self, x, token_ids=None, out=None):
        y = super().forward(self.planted.before(self, x, None), token_ids=token_ids, out=out)
        return self.planted.after(self, x, None, y)

    def experts(self, x, expert_ids, weights, out=None):
        y = super().experts(self.planted.before(self, x, expert_ids), expert_ids, weights, out=out)
        return self.planted.after(self, x, expert_ids, y)


class FaultyDense(DenseMLP):
    """A DenseMLP with a fault."""

    planted: Fault

    def forward(self, x, out=None):
        y = super().forward(self.planted.before(self, x, None), out=out)
        return self.planted.after(self, x, None, y)


def faulty(layer: MoELayer | DenseMLP, fault: type[Fault]) -> MoELayer | DenseMLP:
    """The same layer, turned into one that goes wrong."""
    layer.__class__ = FaultyMoE if isinstance(layer, MoELayer) else FaultyDense
    layer.planted = fault()
    return layer
