"""FP8 linear layers of a transformers model outside its MLP blocks, run by our DenseLinear.

As with whole blocks, the module's forward is replaced on the instance; its class, its parameters
and their names stay, and the weight stays packed.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from exactmoe.checkpoint import WeightPlan
from exactmoe.errors import CheckpointError, ConfigError, Unsupported
from exactmoe.formats import BLOCK, PackedWeight
from exactmoe.hf import storage
from exactmoe.hf.whole_block import Options
from exactmoe.linear import DenseLinear
from exactmoe.ops import compiled

_MARK = "exactmoe_linear"
_BLOCK = BLOCK["fp8"]


class PackedLinear:
    """What stands in `forward` of a linear module: a DenseLinear over the module's parameters.

    It copies, pickles and moves with its module; then the layer is built anew.
    """

    def __init__(self, module: nn.Module, options: Options) -> None:
        self.module, self.options = module, options
        self.groups = groups_of(module)
        self.columns = int(module.out_features) // self.groups  # type: ignore[arg-type]
        self._cache = storage.LayerCache()

    @property
    def layer(self) -> DenseLinear:
        """The layer over the parameters as they are now."""
        return self._cache.get(self.module, self._build)  # type: ignore[no-any-return]

    def _build(self) -> DenseLinear:
        weight = storage.linear_weight(self.module)
        if not isinstance(weight, PackedWeight):
            raise Unsupported(
                f"the weight became {weight.dtype} without scales; allowed: as it was loaded"
            )
        grouped = in_groups(weight, self.groups)
        return DenseLinear(grouped, self.options.limits, self.options.backend)

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """hidden_states bfloat16 [..., K] -> [..., N]; of G groups [..., G, K] -> [..., G, N]."""
        if torch.compiler.is_compiling():
            run, dtype = PackedLinear.run, hidden_states.dtype
            return compiled.block(self, run, hidden_states, None, dtype, self.columns)
        return self.run(hidden_states)

    def run(self, hidden_states: Tensor) -> Tensor:
        """The call itself, not traced."""
        storage.refuse_gradients(self.module, hidden_states)
        layer = self.layer
        y = layer(hidden_states.reshape(-1, layer.in_features))
        return y.view(*hidden_states.shape[:-1], self.columns)

    def move(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Stands in `module._apply`: parameters may move, but no dtype changes."""
        return storage.move_bytes(self.module, fn, recurse)


def groups_of(module: nn.Module) -> int:
    """Groups with inputs of their own: 1, or those of DeepSeek-V4's grouped output projection.

    Raises:
        Unsupported: no linear module, one with a forward that is not known, or one with a bias.
    """
    kind = type(module)
    grouped = kind.__name__.endswith("GroupedLinear") and hasattr(module, "n_groups")
    if not isinstance(module, nn.Linear) or (kind.forward is not nn.Linear.forward and not grouped):
        raise Unsupported(f"{kind.__name__} has an FP8 weight; allowed: nn.Linear, grouped or not")
    if module.bias is not None:
        raise Unsupported(f"{kind.__name__} has an FP8 weight and a bias; allowed: no bias")
    return int(module.n_groups) if grouped else 1  # type: ignore[arg-type]


def in_groups(weight: PackedWeight, groups: int) -> PackedWeight:
    """An FP8 weight [1, G x N, K] as [G, N, K]: the same codes, and the scales of each group.

    Raises:
        Unsupported: a block of scales that begins inside a group.
    """
    rows = weight.rows // groups
    if groups == 1 or weight.scales is None:
        return weight
    scales = weight.scales[0]
    if rows % _BLOCK == 0:
        own = scales.unflatten(0, (groups, -1))
    elif _BLOCK % rows == 0:
        own = scales.repeat_interleave(_BLOCK // rows, 0)[:groups, None]
    else:
        raise Unsupported(
            f"{groups} groups of {rows} rows in blocks of {_BLOCK}; "
            f"allowed: rows that divide {_BLOCK}, or multiples of it"
        )
    return replace(weight, codes=weight.codes.view(groups, rows, -1), scales=own.contiguous())


def attach_linears(model: nn.Module, plans: Mapping[str, WeightPlan], options: Options) -> None:
    """Let our layers run linear modules of a model: name of the module -> its tensors.

    Each is built at once, so its errors are met here.

    Raises:
        CheckpointError: a byte that the contract refuses; names file and tensor.
        Unsupported: a module that is no plain linear layer.
    """
    for name, plan in plans.items():
        module = model.get_submodule(name)
        linear = PackedLinear(module, options)
        try:
            _ = linear.layer
        except ConfigError as error:
            field = "scales" if str(error).startswith("block scale") else "codes"
            places = {part.field: stored for part, stored in plan.sources[0].parts.items()}
            raise CheckpointError(f"{places[field]}: {error}") from error
        setattr(module, _MARK, linear)
        module.forward = linear  # type: ignore[method-assign]
        module._apply = MethodType(PackedLinear.move, linear)  # type: ignore[method-assign]


def linears(model: nn.Module) -> list[tuple[str, nn.Module, DenseLinear]]:
    """(name, module, our layer) of every linear module that runs here, in order."""
    found = []
    for name, module in model.named_modules():
        packed: Any = getattr(module, _MARK, None)
        if isinstance(packed, PackedLinear):
            found.append((name, module, packed.layer))
    return found
