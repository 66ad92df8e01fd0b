"""One layer on several cards, for tests that compare it with the same layer on one."""

import torch
from torch import Tensor

from exactmoe import Limits, MoELayer, Placement, ops
from exactmoe.bank import Partition
from exactmoe.config import RETURNS
from exactmoe.runtime.workspace import Region, arena

GUARD_BITS, GUARD_WORDS = 0x7FC54321, 17


def on_cards(
    layer: MoELayer, partition: Partition, returns: str = "auto", serial: bool = False, **settings
) -> MoELayer:
    """The layer over several CPU cards; an id that is out of range raises at once."""
    kind = settings.pop("kind", MoELayer)
    placement = Placement(("cpu",) * partition.num_cards, partition.owners, returns, serial)
    return kind(
        layer.config,
        layer.bank,
        layer.router,
        layer.shared,
        placement,
        backend=settings.pop("backend", layer.backend),
        limits=settings.pop("limits", Limits(checks=True)),
    )


def ways(partition: Partition) -> tuple[str, ...]:
    """What cards of a partition may send back."""
    return RETURNS[1:] if partition.is_aligned else ("slots",)


class GuardedLayer(MoELayer):
    """A layer with guard words behind every array of its workspace."""

    def regions(self, rows, storage):
        plain, guarded = super().regions(rows, storage), []
        for region in plain:
            guarded += [region, Region(f"guard of {region.name}", (GUARD_WORDS,), torch.int32)]
        return guarded

    def guards(self) -> dict[str, Tensor]:
        """The guard words, by the name of their array."""
        storage = ops.path(self.plan().backend).storage
        views = arena(self.device).views(self.regions(self.max_rows, storage))
        prefix = "guard of "
        return {n.removeprefix(prefix): v for n, v in views.items() if n.startswith(prefix)}

    def poison(self) -> None:
        """NaN bits in all arrays, guard words included."""
        memory = arena(self.device).memory
        memory[: memory.nbytes // 4 * 4].view(torch.int32).fill_(GUARD_BITS)
