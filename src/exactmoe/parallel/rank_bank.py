"""RankBank: the experts of a layer that this rank owns, and the way back to all of them."""

import hashlib
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn

from exactmoe.bank import ExpertBank
from exactmoe.bank.projections import PROJECTIONS, Projections
from exactmoe.config import CONTRACT_VERSION
from exactmoe.errors import ConfigError
from exactmoe.formats import PackedWeight
from exactmoe.ops import Path
from exactmoe.parallel.rank_wire import RankWire
from exactmoe.plan import WeightShape, architecture_name


class RankBank(Projections):
    """E experts over ranks. gate, up, down and `weights()` are those of this rank's own experts.

    Args:
        own: the experts that the partition gives this rank, ascending by id.
        wire: how the ranks work together.

    Raises:
        ConfigError: `own` has another number of experts, or is on another device.
    """

    def __init__(self, own: ExpertBank, wire: RankWire) -> None:
        super().__init__()
        if own.num_experts != len(wire.experts):
            raise ConfigError(
                f"the bank holds {own.num_experts} experts; the partition gives rank "
                f"{wire.ranks.rank} {len(wire.experts)}"
            )
        if own.device != wire.ranks.device:
            raise ConfigError(f"the bank is on {own.device}; this rank is on {wire.ranks.device}")
        self.own, self.wire = own, wire

    @classmethod
    def cut(cls, bank: ExpertBank, wire: RankWire) -> "RankBank":
        """This rank's experts of a bank that holds all: copies, so that the bank may go."""
        wire.partition.require(bank.num_experts, wire.ranks.size)
        places = torch.tensor(wire.experts, device=bank.device)

        def part(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.index_select(0, places)

        def taken(weight: PackedWeight) -> PackedWeight:
            codes = weight.codes.index_select(0, places)
            scales, scalars = part(weight.scales), part(weight.global_scale)
            return PackedWeight(weight.format, codes, scales, scalars, weight.global_scale_op)

        gate, up, down = map(taken, bank.weights())
        return cls(ExpertBank(gate, up, down), wire)

    @property
    def device(self) -> torch.device:
        return self.own.device

    @property
    def num_experts(self) -> int:
        """E, of all ranks together."""
        return self.wire.partition.num_experts

    @property
    def formats(self) -> tuple[str, str, str]:
        return self.own.formats

    @property
    def shapes(self) -> tuple[WeightShape, ...]:
        return self.own.shapes

    @property
    def nbytes(self) -> int:
        """Bytes on this rank."""
        return self.own.nbytes

    @property
    def layout(self) -> str:
        return self.own.layout

    @property
    def fixed_order(self) -> bool:
        return self.own.fixed_order

    def packed(self, name: str) -> PackedWeight:
        return self.own.packed(name)

    def prepared_for(self, path: Path) -> tuple[Any, ...]:
        return self.own.prepared_for(path)

    def arrange(self, wanted: str) -> None:
        self.own.arrange(wanted)

    def join(self) -> ExpertBank:
        """All experts, on every rank: a copy, for proofs. Every rank has to call it."""
        gate, up, down = (self._joined(self.packed(name)) for name in PROJECTIONS)
        return ExpertBank(gate, up, down)

    def _joined(self, weight: PackedWeight) -> PackedWeight:
        parts = (weight.codes, weight.scales, weight.global_scale)
        codes, scales, scalars = (None if p is None else self._gathered(p) for p in parts)
        assert codes is not None
        return PackedWeight(weight.format, codes, scales, scalars, weight.global_scale_op)

    def _gathered(self, mine: Tensor) -> Tensor:
        partition, ranks = self.wire.partition, self.wire.ranks
        most = max(partition.counts)
        padded = mine.new_zeros(most, *mine.shape[1:])
        padded[: len(mine)].copy_(mine)
        everyone = mine.new_empty(ranks.size * most, *mine.shape[1:])
        ranks.all_gather(padded, everyone)
        place = {
            expert: rank * most + local
            for rank, owned in enumerate(partition.experts)
            for local, expert in enumerate(owned)
        }
        order = [place[expert] for expert in range(partition.num_experts)]
        return everyone.index_select(0, torch.tensor(order, device=mine.device))

    def extra_repr(self) -> str:
        return f"rank {self.wire.ranks.rank} of [{self.wire.partition}]"


def program_facts(wire: RankWire) -> dict[str, Any]:
    """What must be the same on every rank, whatever the layer."""
    try:
        package = version("exactmoe")
    except PackageNotFoundError:
        package = "not installed"
    return {
        "the version of exactmoe": package,
        "the contract version": CONTRACT_VERSION,
        "the version of torch": torch.__version__,
        "the architecture": architecture_name(wire.ranks.device),
        "the partition": wire.partition.owners,
        "tokens": wire.tokens,
        "returns": wire.returns,
    }


def digest(module: nn.Module | None) -> str:
    """SHA-256 over the parameters and buffers of a module, in hexadecimal; reads all of them."""
    found = hashlib.sha256()
    state: Mapping[str, Tensor] = {} if module is None else module.state_dict()
    for name, tensor in sorted(state.items()):
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        found.update(raw.numpy().tobytes())
    return found.hexdigest()
