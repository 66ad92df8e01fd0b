"""SplitBank: the experts of a layer, each on one card; and the way there from a resident bank.

An expert's codes and scales are on one card only, its global scales too: nothing reads them on
another. The copies are checked byte by byte before the full bank is released.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from exactmoe.bank.expert_bank import ExpertBank
from exactmoe.bank.partition import Partition
from exactmoe.bank.projections import PROJECTIONS, Projections
from exactmoe.errors import BitMismatch, ConfigError
from exactmoe.formats import PackedWeight
from exactmoe.ops import Path
from exactmoe.runtime.devices import current

if TYPE_CHECKING:
    from exactmoe.plan import WeightShape

PIECE_BYTES = 64 << 20
_INT64_MAX = 2**63 - 1


class SplitBank(Projections):
    """E experts on several cards: one ExpertBank a card, whose experts have local ids.

    It is made by `ExpertBank.split`. gate, up and down are copies of all experts in canonical
    order on the first card.

    Args:
        banks: by card; the experts that `partition` gives it, ascending by id.
        partition: who owns which expert.

    Raises:
        ConfigError: banks and partition do not belong together.
    """

    def __init__(self, banks: Sequence[ExpertBank], partition: Partition) -> None:
        super().__init__()
        found = tuple(bank.num_experts for bank in banks)
        if found != partition.counts:
            raise ConfigError(
                f"the banks hold {found} experts; the partition gives the cards {partition.counts}"
            )
        first = banks[0]
        for card, bank in enumerate(banks):
            alike = (bank.hidden_size, bank.intermediate_size, bank.formats)
            asked = (first.hidden_size, first.intermediate_size, first.formats)
            if alike != asked:
                raise ConfigError(
                    f"the bank of card {card} is {alike} (hidden, intermediate, formats); "
                    f"card 0 asks for {asked}"
                )
        self.partition = partition
        self.banks = nn.ModuleList(banks)

    def __getitem__(self, card: int) -> ExpertBank:
        """The experts that a card owns."""
        bank = self.banks[card]
        assert isinstance(bank, ExpertBank)
        return bank

    def __iter__(self) -> Iterator[ExpertBank]:
        return (self[card] for card in range(self.partition.num_cards))

    @property
    def cards(self) -> tuple[torch.device, ...]:
        """The device of each card."""
        return tuple(bank.device for bank in self)

    @property
    def device(self) -> torch.device:
        """Of the first card."""
        return self[0].device

    @property
    def num_experts(self) -> int:
        return self.partition.num_experts

    @property
    def formats(self) -> tuple[str, str, str]:
        """Formats of gate, up and down."""
        return self[0].formats

    @property
    def shapes(self) -> "tuple[WeightShape, ...]":
        """Format, rows and columns of gate, up and down."""
        return self[0].shapes

    @property
    def nbytes(self) -> int:
        """Bytes on all cards together."""
        return sum(bank.nbytes for bank in self)

    @property
    def layout(self) -> str:
        """Order of the bytes of all cards: "canonical" or "fragment"."""
        return self[0].layout

    @property
    def fixed_order(self) -> bool:
        return any(bank.fixed_order for bank in self)

    def packed(self, name: str) -> PackedWeight:
        """One projection of all experts: a copy on the first card, in canonical order."""
        parts = [bank.packed(name) for bank in self]
        order = [expert for owned in self.partition.experts for expert in owned]
        places = torch.tensor(order, device=self.device).argsort()

        def joined(tensors: list[Tensor | None]) -> Tensor | None:
            given = [tensor.to(self.device) for tensor in tensors if tensor is not None]
            return torch.cat(given).index_select(0, places) if given else None

        codes = joined([part.codes for part in parts])
        assert codes is not None
        return PackedWeight(
            parts[0].format,
            codes,
            joined([part.scales for part in parts]),
            joined([part.global_scale for part in parts]),
            parts[0].global_scale_op,
        )

    def join(self) -> ExpertBank:
        """All experts on the first card: a copy."""
        gate, up, down = self.weights()
        return ExpertBank(gate, up, down)

    def prepared_for(self, path: Path) -> None:
        """Prepare the experts of every card for a path (ExpertBank.prepared_for)."""
        for bank in self:
            with current(bank.device):
                bank.prepared_for(path)

    def extra_repr(self) -> str:
        return str(self.partition)


def over(bank: ExpertBank, partition: Partition) -> SplitBank:
    """A bank as one of several cards of its own device, over the same memory: nothing is copied.

    Raises:
        ConfigError: the partition is of other experts, or the experts of a card are not
            consecutive.
    """
    partition.require(bank.num_experts, partition.num_cards)
    banks = []
    for card, owned in enumerate(partition.experts):
        low, high = owned[0], owned[-1] + 1
        if high - low != len(owned):
            raise ConfigError(
                f"the experts of card {card} are not consecutive in [{partition}]; allowed over "
                "the same memory: consecutive ones"
            )
        parts = (
            PackedWeight(
                weight.format,
                weight.codes[low:high],
                None if weight.scales is None else weight.scales[low:high],
                None if weight.global_scale is None else weight.global_scale[low:high],
                weight.global_scale_op,
            )
            for weight in bank.weights()
        )
        gate, up, down = parts
        # Its order is that of the bank's whole memory.
        banks.append(ExpertBank(gate, up, down, fixed_order=True))
    return SplitBank(banks, partition)


def split(
    bank: ExpertBank,
    partition: Partition,
    cards: Sequence[torch.device | str],
    *,
    keep: bool = False,
    piece_bytes: int = PIECE_BYTES,
) -> SplitBank:
    """As `ExpertBank.split`, in pieces of another size (for tests)."""
    devices = [torch.device(card) for card in cards]
    partition.require(bank.num_experts, len(devices))
    if piece_bytes < 1:
        raise ConfigError(f"piece_bytes is {piece_bytes}; allowed: from 1")
    found: list[dict[str, PackedWeight]] = [{} for _ in devices]
    for name in PROJECTIONS:
        weight = bank.packed(name)
        for card, device in enumerate(devices):
            piece = _Piece(name, card, device, partition.experts[card], piece_bytes)
            found[card][name] = _cut(weight, piece)
    banks = [ExpertBank(parts["gate"], parts["up"], parts["down"]) for parts in found]
    result = SplitBank(banks, partition)
    if not keep:
        bank.release()
    return result


@dataclass(frozen=True)
class _Piece:
    """What of one projection goes to one card."""

    projection: str
    card: int
    device: torch.device
    experts: tuple[int, ...]
    piece_bytes: int

    @property
    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Consecutive experts as (first expert, count, first local id)."""
        start = 0
        for local in range(1, len(self.experts) + 1):
            ends = local == len(self.experts)
            if ends or self.experts[local] != self.experts[local - 1] + 1:
                yield self.experts[start], local - start, start
                start = local


def _cut(weight: PackedWeight, piece: _Piece) -> PackedWeight:
    """The experts of one card, their bytes on its device, each byte read back and compared."""
    codes = _copied(weight.codes, "codes", piece)
    scales = None if weight.scales is None else _copied(weight.scales, "scales", piece)
    scalars = weight.global_scale
    if scalars is not None:
        scalars = _copied(scalars, "global scales", piece)
    return PackedWeight(weight.format, codes, scales, scalars, weight.global_scale_op)


def _copied(source: Tensor, part: str, piece: _Piece) -> Tensor:
    shape = (len(piece.experts), *source.shape[1:])
    with torch.inference_mode(False):
        found = torch.empty(shape, dtype=source.dtype, device=piece.device)
    given, taken = _bytes(source), _bytes(found)
    stride = given.shape[1]
    label = f"{piece.projection} {part} of card {piece.card}"
    for first, count, local in piece.runs:
        source_at = within(first, count, stride, given.numel(), f"{label}, in the full bank")
        target_at = within(local, count, stride, taken.numel(), f"{label}, on the card")
        _copy_run(given, taken, (source_at, target_at, count * stride), piece.piece_bytes)
        _compare_run(
            (given, taken), (source_at, target_at, count * stride), piece.piece_bytes, label
        )
    return found


def within(first: int, count: int, stride: int, available: int, label: str) -> int:
    """Byte at which `count` experts of `stride` bytes begin.

    Raises:
        ConfigError: they pass what is available, or what 64-bit addresses hold.
    """
    size, start = count * stride, first * stride
    if min(first, count, stride) < 0 or max(size, start, start + size) > _INT64_MAX:
        raise ConfigError(
            f"{label}: experts {first} to {first + count - 1} of {stride} bytes pass 64-bit "
            "addresses"
        )
    if start + size > available:
        raise ConfigError(
            f"{label}: experts {first} to {first + count - 1} end at byte {start + size}; there "
            f"are {available}"
        )
    return start


def _bytes(tensor: Tensor) -> Tensor:
    """uint8 [experts, bytes of one]: where the tensor lies."""
    if not tensor.is_contiguous():
        # Rows of a bank over a model's parameters: gate and up share one tensor there.
        tensor = tensor.contiguous()
    return tensor.view(tensor.shape[0], -1).view(torch.uint8)


def _pieces(run: tuple[int, int, int], piece_bytes: int) -> Iterator[tuple[slice, slice]]:
    source_at, target_at, size = run
    for done in range(0, size, piece_bytes):
        length = min(piece_bytes, size - done)
        yield (
            slice(source_at + done, source_at + done + length),
            slice(target_at + done, target_at + done + length),
        )


def copy_piece(source: Tensor, target: Tensor) -> None:
    """One piece of bytes from where it is to a card."""
    target.copy_(source)


def _copy_run(given: Tensor, taken: Tensor, run: tuple[int, int, int], piece_bytes: int) -> None:
    source, target = given.view(-1), taken.view(-1)
    for there, here in _pieces(run, piece_bytes):
        copy_piece(source[there], target[here])


def _compare_run(
    sides: tuple[Tensor, Tensor], run: tuple[int, int, int], piece_bytes: int, label: str
) -> None:
    """Read both sides back to the host and compare.

    Raises:
        BitMismatch: names the card and the piece.
    """
    source, target = (side.view(-1) for side in sides)
    for there, here in _pieces(run, piece_bytes):
        wanted, found = source[there].cpu(), target[here].cpu()
        if not torch.equal(wanted, found):
            place = int((wanted != found).nonzero()[0])
            raise BitMismatch(
                f"{label}: the piece of bytes {here.start} to {here.stop - 1} differs first at "
                f"byte {here.start + place}: found 0x{int(found[place]):02X}, the full bank has "
                f"0x{int(wanted[place]):02X}; nothing was released"
            )


__all__ = ["PIECE_BYTES", "SplitBank", "split"]
