"""save_pretrained of a model that load_model loaded: names and bytes of its checkpoint.

transformers' own way back does not do: its names are not always the published ones, it casts what
was loaded in another dtype, and it copies every expert. Here each tensor of the MLP blocks goes
back to the place that the load plan says, as a view; the rest takes transformers' way and is then
given its published name and dtype; what nobody loads (MTP layers, input scales) is read again.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from exactmoe.bank import ExpertBank, SplitBank
from exactmoe.checkpoint import Checkpoint, LayerPlan, TensorInfo, WeightPlan
from exactmoe.checkpoint.files import DTYPES
from exactmoe.dense import DenseMLP
from exactmoe.errors import CheckpointError, Unsupported
from exactmoe.formats import PackedWeight
from exactmoe.formats.scales import decode_e8m0
from exactmoe.hf import adapter
from exactmoe.hf.conversions import GLOBAL_SCALE, SCALE
from exactmoe.hf.storage import linear_weight
from exactmoe.hf.whole_block import blocks, raw_state_dicts
from exactmoe.layer import MoELayer
from exactmoe.ops import CANONICAL

_SHOWN = 5


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a model was loaded from.

    Attributes:
        checkpoint: its headers.
        plans: of all layers, in order.
        unread: names of the tensors that nobody loads; saving copies them from the files.
        linears: of the FP8 linear layers outside the MLP blocks, by the name of the module.
    """

    checkpoint: Checkpoint
    plans: tuple[LayerPlan, ...]
    unread: frozenset[str]
    linears: Mapping[str, WeightPlan] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Origin":
        return self  # never changed

    def state_dict(self, model: Any, conversions: list[Any]) -> dict[str, Tensor]:
        """All tensors of the checkpoint, with the values that the model has now.

        Args:
            model: the model.
            conversions: transformers' conversions that the load used.

        Raises:
            CheckpointError: names that do not match, or files that are gone or changed.
            Unsupported: parameters are offloaded.
        """
        saved = self.other_tensors(model, conversions)
        for index, _, layer in blocks(model):
            saved |= self.block_tensors(index, layer)
        unread = [self.checkpoint.tensors[name] for name in self.unread]
        saved |= read(self.checkpoint.path, unread)
        return saved

    def block_tensors(self, index: int, layer: MoELayer | DenseMLP) -> dict[str, Tensor]:
        """The tensors of one MLP block, which `layer` runs; routed experts of a card whose memory
        cannot be given away as copies on the host.
        """
        saved: dict[str, Tensor] = {}
        plan = self.plans[index]
        dense = layer if isinstance(layer, DenseMLP) else layer.shared
        if isinstance(layer, MoELayer):
            for projection, weight in plan.experts.items():
                _add(saved, weight, _to_save(layer.bank, projection))
            for name, info in plan.router.items():
                saved[info.name] = _in_dtype(getattr(layer.router, name), info.dtype)
        for projection, weight in plan.dense.items():
            _add(saved, weight, dense.bank.packed(projection))  # type: ignore[union-attr]
        return saved

    def other_tensors(self, model: Any, conversions: list[Any]) -> dict[str, Tensor]:
        """Everything that is in no MLP block and is not unread, over the parameters' memory."""
        with raw_state_dicts():
            state = model.state_dict()
        _require_in_memory(state)
        names = {id(module): name for name, module in model.named_modules()}
        inside = {info.name for plan in self.plans for info, _ in plan.consumed()}
        saved: dict[str, Any] = dict.fromkeys(inside)
        prefixes = tuple(f"{names[id(block)]}." for _, block, _ in blocks(model))
        prefixes += self._linears(model, saved)
        rest = {name: t for name, t in state.items() if not name.startswith(prefixes)}
        self._rest(saved, adapter.revert(model, rest, conversions), model, conversions)
        return {name: tensor for name, tensor in saved.items() if name not in inside}

    def _linears(self, model: Any, saved: dict[str, Tensor]) -> tuple[str, ...]:
        """Adds the FP8 linear layers outside the blocks; returns their names' prefixes."""
        for name, plan in self.linears.items():
            weight = linear_weight(model.get_submodule(name))
            if not isinstance(weight, PackedWeight):
                raise CheckpointError(
                    f"{name} became {weight.dtype}; allowed for saving: as it was loaded"
                )
            _add(saved, plan, weight)
        return tuple(f"{name}." for name in self.linears)

    def _rest(
        self, saved: dict[str, Tensor], state: dict[str, Tensor], model: Any, conversions: list[Any]
    ) -> None:
        """Adds what transformers loaded, by published name and in published dtype."""
        place_of = adapter.destinations(model, conversions)
        by_place = {place_of(name): name for name in state}
        wanted = [name for name in self.checkpoint.tensors if name not in saved]
        wanted = [name for name in wanted if name not in self.unread]
        taken, memory = set(), set()
        for name in wanted:
            found = by_place.get(place_of(name))
            if found is None:
                continue
            info, value = self.checkpoint.tensors[name], state[found]
            taken.add(found)
            value = _as_published(value, info, self.checkpoint.path)
            saved[name] = value.clone() if value.data_ptr() in memory else value
            memory.add(value.data_ptr())
        left = [n for n, t in state.items() if n not in taken and t.data_ptr() not in memory]
        problems = [f"{name} has no parameter" for name in wanted if name not in saved]
        problems += [f"{name} is not in the checkpoint" for name in left]
        if problems:
            more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
            shown = "; ".join(problems[:_SHOWN])
            raise CheckpointError(
                f"the model cannot be saved as {self.checkpoint.path} was: {shown}{more}"
            )


def _to_save(bank: ExpertBank | SplitBank, projection: str) -> PackedWeight:
    """A projection in canonical order: the parameters' own memory, or a copy on the host, since all
    of them together may not fit the card a second time.
    """
    weight = bank.packed(projection)
    apart = isinstance(bank, SplitBank) and len(set(bank.cards)) > 1
    if bank.layout == CANONICAL and not apart:
        return weight
    return replace(
        weight,
        codes=weight.codes.cpu(),
        scales=None if weight.scales is None else weight.scales.cpu(),
        global_scale=None if weight.global_scale is None else weight.global_scale.cpu(),
    )


def quantized_state_dict(
    model: Any, conversions: list[Any], packed: list[str]
) -> dict[str, Tensor]:
    """The tensors of a model that was quantised at load, by the names that transformers saves.

    Args:
        model: the model.
        conversions: transformers' conversions of its bfloat16 checkpoint.
        packed: names of the parameters that hold codes.

    Raises:
        Unsupported: parameters are offloaded, or transformers would turn codes around.
    """
    _require_in_memory(model.state_dict())
    for conversion in conversions:
        _, targets = adapter.converter_names(conversion)
        ends = tuple(target.lstrip("\\.") for target in targets)
        if ends and not adapter.only_stacks(conversion) and any(n.endswith(ends) for n in packed):
            raise Unsupported(
                f"{type(model).__name__} stores its experts in an order that packed codes "
                "cannot have; such a model cannot be saved"
            )
    state = adapter.without_ties(model)
    saved: dict[str, Tensor] = {}
    for parameter in packed:
        for suffix in (SCALE, GLOBAL_SCALE):
            if parameter + suffix not in state:
                continue
            stacked = state.pop(parameter + suffix)
            # The same way back as the codes', then under their own name.
            reverted = adapter.revert(model, {parameter: stacked}, conversions)
            if len(reverted) == 1:
                saved |= adapter.revert(model, {parameter + suffix: stacked}, conversions)
                continue
            # (5.17 drops every dimension of 1 on the way.)
            shape = () if suffix == GLOBAL_SCALE else (-1, stacked.shape[-1])
            for name, value in reverted.items():
                saved[_beside(name, suffix, value.dtype)] = value.reshape(shape)
    saved |= adapter.revert(model, state, conversions)
    return {name: own_storage(value) for name, value in saved.items()}


def _beside(name: str, suffix: str, dtype: torch.dtype) -> str:
    """The published name of a scale beside the weight of one expert: ModelOpt's or DeepSeek's."""
    if dtype == torch.float8_e8m0fnu:
        return name.removesuffix("weight") + "scale"
    return name + suffix


def _require_in_memory(state: dict[str, Tensor]) -> None:
    if any(tensor.is_meta for tensor in state.values()):
        raise Unsupported("parameters are offloaded; allowed for saving: all in memory")


def _add(saved: dict[str, Tensor], weight: WeightPlan, packed: PackedWeight) -> None:
    """The tensors that one projection of all experts came from."""
    for expert, source in enumerate(weight.sources):
        for part, stored in source.parts.items():
            info = stored.info
            value = _in_dtype(getattr(packed, part.field)[expert], info.dtype)
            if not stored.index:
                saved[info.name] = own_storage(value.reshape(info.shape))
                continue
            if info.name not in saved:
                device = value.device
                saved[info.name] = torch.empty(info.shape, dtype=value.dtype, device=device)
            place = saved[info.name][stored.index]
            place.copy_(value.reshape(place.shape))


def _in_dtype(value: Tensor, name: str) -> Tensor:
    """A tensor of ours in the dtype of the file; bytes as they are, numbers only if exact."""
    dtype = DTYPES[name]
    if value.dtype == dtype:
        return value
    if value.dtype == torch.uint8 and dtype.itemsize == 1:
        return value.view(dtype)
    if value.dtype == torch.uint8:
        return decode_e8m0(value).to(dtype)
    cast = _e8m0(value) if dtype == torch.float8_e8m0fnu else value.to(dtype)
    return cast if cast.to(value.dtype).equal(value) else value


def _e8m0(value: Tensor) -> Tensor:
    """Float32 powers of two from 2^-127: their exponent bits are the E8M0 byte."""
    return (value.view(torch.int32) >> 23).to(torch.uint8).view(torch.float8_e8m0fnu)


def _as_published(value: Tensor, info: TensorInfo, folder: Path) -> Tensor:
    """A parameter of transformers in the dtype of the file.

    Where the load rounded it, the file's own value comes back, unless the parameter was changed.
    """
    found = _in_dtype(value, info.dtype)
    if found.dtype != value.dtype and found.dtype.itemsize > value.dtype.itemsize:
        original = read(folder, [info])[info.name].to(value.device)
        return original if original.to(value.dtype).equal(value) else found
    return found


def own_storage(tensor: Tensor) -> Tensor:
    """The same memory under a storage of its own.

    transformers clones tensors that share a storage, and puts them into one file.
    """
    if tensor.ndim == 0 or not tensor.is_contiguous():
        return tensor.clone(memory_format=torch.contiguous_format)
    return from_dlpack(tensor.view(torch.uint8)).view(tensor.dtype)


def read(folder: Path, infos: Iterable[TensorInfo]) -> dict[str, Tensor]:
    """Tensors as they lie in the files, in memory of their own.

    Raises:
        CheckpointError: a file is gone, or holds something else than when it was opened first.
    """
    files: dict[str, list[TensorInfo]] = {}
    for info in infos:
        files.setdefault(info.file, []).append(info)
    found = {}
    for file, group in files.items():
        try:
            with safe_open(folder / file, framework="pt") as opened:
                for info in group:
                    _require_same(opened.get_slice(info.name), info, folder)
                    found[info.name] = opened.get_tensor(info.name).clone()
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{folder / file}: {group[0].name} is needed again for saving: {error}"
            ) from error
    return found


def _require_same(entry: Any, info: TensorInfo, folder: Path) -> None:
    if (entry.get_dtype(), tuple(entry.get_shape())) != (info.dtype, info.shape):
        raise CheckpointError(
            f"{folder / info.file}: {info.name} is {entry.get_dtype()} {entry.get_shape()} now; "
            f"it was {info.dtype} {list(info.shape)} when the model was loaded"
        )
