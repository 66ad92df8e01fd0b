"""One layer on several cards, for tests that compare it with the same layer on one."""

import torch
from torch import Tensor

from exactmoe import Limits, MoELayer, Placement, ops
from exactmoe.bank import Partition
from exactmoe.config import RETURNS
from exactmoe.runtime.workspace import Arena, Region, arena, beside

GUARD_BITS, GUARD_WORDS = 0x7FC54321, 17
_GUARD = " guard"


def on_cards(
    layer: MoELayer, partition: Partition, returns: str = "auto", serial: bool = False, **settings
) -> MoELayer:
    """The layer over several cards, in turn of those named (default "cpu"); an id that is out of
    range raises at once.
    """
    kind = settings.pop("kind", MoELayer)
    given = settings.pop("names", ("cpu",))
    names = [given[card % len(given)] for card in range(partition.num_cards)]
    placement = Placement(names, partition.owners, returns, serial)
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


def arenas_of(layer: MoELayer) -> dict[torch.device, Arena]:
    """What a call of the layer would take now, by device."""
    home, *others = layer.devices
    held = arena(home)
    return {home: held, **{device: beside(held, device) for device in others}}


def fill(arenas: dict[torch.device, Arena], byte: int = 0xFF) -> None:
    """The byte in all memory of some arenas; 0xFF makes every float a NaN. Waits for all devices,
    since a graph's work on a further one is behind nothing there.
    """
    _wait(arenas)
    for held in arenas.values():
        held.fill(byte)
    _wait(arenas)


def _wait(arenas: dict[torch.device, Arena]) -> None:
    for device in arenas:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


class GuardedLayer(MoELayer):
    """A layer with guard words behind every array of its workspace."""

    def regions(self, rows, storage):
        plain, guarded = super().regions(rows, storage), []
        for region in plain:
            # Its name begins as the region's, so that it lies on the same card.
            guarded += [region, Region(f"{region.name}{_GUARD}", (GUARD_WORDS,), torch.int32)]
        return guarded

    def guards(self, arenas: dict[torch.device, Arena] | None = None) -> dict[str, Tensor]:
        """The guard words, by the name of their array."""
        storage, found = ops.path(self.plan().path).storage, {}
        for device, held in (arenas or arenas_of(self)).items():
            found |= held.views(self.regions_on(device, self.max_rows, storage))
        return {n.removesuffix(_GUARD): v for n, v in found.items() if n.endswith(_GUARD)}

    def poison(self, arenas: dict[torch.device, Arena] | None = None) -> None:
        """NaN bits in all arrays, guard words included."""
        arenas = arenas or arenas_of(self)
        _wait(arenas)
        for held in arenas.values():
            memory = held.memory
            memory[: memory.nbytes // 4 * 4].view(torch.int32).fill_(GUARD_BITS)
        _wait(arenas)


def guarded_room(tokens: int, hidden: int, device: str = "cpu") -> Tensor:
    """bf16 memory of NaN bits: 17 words before and after tokens x hidden."""
    room = torch.empty(tokens * hidden + 2 * GUARD_WORDS, dtype=torch.bfloat16, device=device)
    room.view(torch.int16)[:] = 0x7FC5
    return room
