"""Peer: another implementation of the same work, timed in the same run."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from exactmoe import ops
from exactmoe.bench.problem import Problem, Selection
from exactmoe.bench.timing import Call
from exactmoe.config import Numerics
from exactmoe.dense import DenseMLP


@dataclass(frozen=True)
class Peer:
    """Routed experts by someone else, the sort by expert made before.

    Attributes:
        name: as in the tables and for --peers.
        what: which kernels, with what settings, in a few words.
        format: of the weights: the problem's, or "mxfp4" where the peer takes no other.
        build: (problem, widths that will be asked for) -> a maker of calls. It may compile. What
            it raises is shown in the table as the reason why the peer did not run.
    """

    name: str
    what: str
    format: str
    build: Callable[[Problem, tuple[int, ...]], Callable[[Selection], Call]]


@dataclass(frozen=True)
class DensePeer:
    """A dense MLP by someone else; `build` gets ours, for its weights."""

    name: str
    what: str
    build: Callable[[DenseMLP], Callable[[Tensor], Call]]


class WeightedSum:
    """The last step of every peer: our combine kernel, so that all peers have the same."""

    def __init__(self, problem: Problem) -> None:
        self._numerics = Numerics()
        self._path = ops.path("triton" if problem.device.type == "cuda" else "cpu")
        self._num_experts = problem.shape.num_experts

    def __call__(self, slots: Tensor, selection: Selection, y: Tensor) -> Tensor:
        """slots bfloat16 [S, H], in the order of the slots -> y bfloat16 [T, H]."""
        routed = (selection.expert_ids, selection.weights)
        slots = slots.to(self._path.storage.slots)
        self._path.combine(slots, routed, self._num_experts, self._numerics, None, y)
        return y


def clamped_swiglu(gate_up: Tensor, limit: float) -> Tensor:
    """[S, 2 I] bfloat16, gate first -> h [S, I] bfloat16, in float32 between."""
    gate, up = gate_up.float().chunk(2, -1)
    return (F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)).bfloat16()


@cache
def fused_swiglu(device_type: str) -> Callable[[Tensor, float], Tensor]:
    """clamped_swiglu as one kernel on a card, as it is on a CPU."""
    if device_type == "cpu":
        return clamped_swiglu
    return torch.compile(clamped_swiglu, dynamic=True)


def sorted_by_expert(selection: Selection, num_experts: int) -> tuple[Tensor, Tensor]:
    """Slots in the order of their experts, int64 [S], and how many each expert serves [E]."""
    flat = selection.expert_ids.flatten().long()
    return flat.argsort(stable=True), flat.bincount(minlength=num_experts)
