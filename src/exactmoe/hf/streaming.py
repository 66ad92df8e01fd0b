"""What a model of transformers is filled with: read by our readers, each byte once.

transformers would collect the tensors of all experts, stack them and join them, in two copies
beside the result. So experts modules come without parameters to its loader, and get theirs here:
made in their final size, on the card that owns the experts, and read into place. What is left to
transformers (attention, embeddings, norms, shared experts) is read when it asks for it.
"""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from exactmoe.bank import Partition
from exactmoe.checkpoint import (
    Checkpoint,
    LayerPlan,
    Reader,
    Share,
    TensorInfo,
    WeightPlan,
    shares_of,
)
from exactmoe.checkpoint.reader import Pending
from exactmoe.errors import CheckpointError
from exactmoe.hf import storage
from exactmoe.hf.adapter import never_initialize
from exactmoe.runtime.free_memory import allocate

# Layers that are being read at once: values of one are checked while the next one comes.
_AHEAD = 2


class LazyTensor:
    """What transformers' loader takes for a tensor of a file: `[...]` reads it, to its device."""

    def __init__(self, reader: Reader, info: TensorInfo, device: torch.device) -> None:
        self._reader, self._info, self._device = reader, info, device

    def __getitem__(self, index: Any) -> Tensor:
        return self._reader.tensor(self._info, self._device)[index]


def lazy_tensors(
    reader: Reader,
    checkpoint: Checkpoint,
    plans: Sequence[LayerPlan],
    unread: Collection[str],
    device: torch.device,
) -> dict[str, LazyTensor]:
    """What transformers loads, by name: all but routed experts, and what nobody reads."""
    streamed = {
        info.name for plan in plans for weight in plan.experts.values() for info in weight.tensors
    }
    return {
        name: LazyTensor(reader, info, device)
        for name, info in checkpoint.tensors.items()
        if name not in streamed and name not in unread
    }


def shares_on(devices: Sequence[torch.device], partition: Partition | None) -> tuple[Share, ...]:
    """What each card gets; where all are one device, all experts lie in one parameter there."""
    if partition is None or len(set(devices)) == 1:
        return (Share(devices[0]),)
    return shares_of(partition, devices)


def without_parameters(experts: nn.Module) -> dict[str, Tensor]:
    """Takes the parameters of an experts module away: name -> parameter, without memory."""
    taken: dict[str, Tensor] = {name: p for name, p in experts._parameters.items() if p is not None}
    for name in taken:
        delattr(experts, name)
    never_initialize(experts)
    return taken


def fill_experts(
    reader: Reader,
    modules: Mapping[int, nn.Module],
    taken: Mapping[int, Mapping[str, Tensor]],
    plans: Sequence[LayerPlan],
    shares: Sequence[Share],
) -> None:
    """Gives experts modules their parameters, filled from the files.

    Args:
        reader: of the checkpoint.
        modules: experts modules by layer.
        taken: what `without_parameters` took, by layer.
        plans: of all layers.
        shares: of the cards. The first one's experts are the module's own parameters; those of the
            others lie in modules below it (storage.peers).

    Raises:
        CheckpointError: a shape that the model does not ask for, or a byte that the contract
            refuses; names file and tensor.
        Unsupported: a card has no room; says which, how much was asked for and is free.
    """
    begun: deque[list[Pending]] = deque()
    for plan in plans:
        if plan.spec.layer not in modules:
            continue
        experts, shapes = modules[plan.spec.layer], taken[plan.spec.layer]
        begun.append(
            [
                pending
                for card, share in enumerate(shares)
                for pending in _begin(
                    reader, storage.card_module(experts, card), shapes, plan, share
                )
            ]
        )
        if len(begun) >= _AHEAD:
            _finish(begun.popleft())
    while begun:
        _finish(begun.popleft())


def _finish(pendings: Sequence[Pending]) -> None:
    for pending in pendings:
        pending.finish()


def _begin(
    reader: Reader,
    module: nn.Module,
    shapes: Mapping[str, Tensor],
    plan: LayerPlan,
    share: Share,
) -> list[Pending]:
    """Makes the parameters of one card and begins to read them."""
    for name, parameter in shapes.items():
        count = parameter.shape[0] if share.experts is None else len(share.experts)
        shape = (count, *parameter.shape[1:])
        what = f"{name} of layer {plan.spec.layer}, {count} experts"
        memory = allocate(shape, parameter.dtype, share.device, what)
        module.register_parameter(name, nn.Parameter(memory, requires_grad=False))
    fields = {projection: storage.fields_of(module, projection) for projection in plan.experts}
    for projection, weight in plan.experts.items():
        _require_shapes(weight, fields[projection], share)
    return list(reader.begin(plan.experts, share.experts, share.device, fields).values())


def _require_shapes(weight: WeightPlan, fields: Mapping[str, Tensor], share: Share) -> None:
    """transformers' config may ask for other sizes than ours."""
    count = len(weight.sources) if share.experts is None else len(share.experts)
    for part in weight.dialect.parts:
        asked = tuple(fields[part.field].shape)
        found = (count, *part.shape(weight.rows, weight.columns))
        if found != asked:
            raise CheckpointError(
                f"{weight.sources[0].base} is {found} in the files, {part.field}; the model of "
                f"transformers asks for {asked}"
            )
