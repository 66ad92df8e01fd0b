"""Whole MLP blocks of a transformers model, run by our layers.

The block's forward is replaced on the instance; its class, its parameters and their names stay.
Contract: router, routed experts and shared expert are one call with one rounding at the end; there
is none before the shared expert is added.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from exactmoe.bank import ExpertBank, Partition
from exactmoe.config import Limits, Placement
from exactmoe.dense import DenseMLP
from exactmoe.errors import CheckpointError, ConfigError, Unsupported
from exactmoe.families import LayerSpec
from exactmoe.hf import adapter, rank_blocks, storage
from exactmoe.layer import MoELayer
from exactmoe.ops import compiled
from exactmoe.parallel.rank_wire import RankPlacement

_MARK = "exactmoe_block"


@dataclass(frozen=True)
class Options:
    """How the layers of a model run; none of it can change a bit.

    partition: which card owns which expert; None: there is one card. placement: how they work
    together; its cards and partition do not count. ranks: how the model lies over ranks; None: it
    is in this process alone.
    """

    limits: Limits | None = None
    backend: str = "auto"
    partition: Partition | None = None
    placement: Placement = Placement()
    ranks: RankPlacement | None = None


class WholeBlock:
    """What stands in `block.forward`: one of our layers over the block's own parameters.

    It copies, pickles and moves with its block; then the layer is built anew over the parameters.
    """

    def __init__(self, block: nn.Module, spec: LayerSpec, options: Options) -> None:
        self.block, self.spec, self.options = block, spec, options
        self._cache = storage.LayerCache()

    @property
    def layer(self) -> MoELayer | DenseMLP:
        """The layer that runs the block, over its parameters as they are now."""
        return self._cache.get(self.block, self._build)  # type: ignore[no-any-return]

    def _build(self) -> MoELayer | DenseMLP:
        block, spec, options = self.block, self.spec, self.options
        if options.ranks is not None:
            return rank_blocks.build(block, spec, options.ranks, options.limits, options.backend)
        if spec.moe is None or spec.router is None:
            return storage.dense_mlp(block, spec.swiglu_limit, options.limits, options.backend)
        bank = storage.banks(block.experts, options.partition)  # type: ignore[arg-type]
        cards = (bank.device,) if isinstance(bank, ExpertBank) else bank.cards
        placement = replace(options.placement, cards=tuple(map(str, cards)), partition=None)
        return MoELayer(
            spec.moe,
            bank,
            router=storage.router(block.gate, spec.router),  # type: ignore[arg-type]
            shared=storage.dense_mlp(
                block.shared_experts,  # type: ignore[arg-type]
                spec.swiglu_limit,
                options.limits,
                options.backend,
            ),
            placement=placement,
            limits=options.limits,
            backend=options.backend,
        )

    def __call__(self, hidden_states: Tensor, input_ids: Tensor | None = None) -> Tensor:
        """hidden_states bfloat16 [..., H] -> the same shape; input_ids [...] for a hash layer."""
        ids = input_ids if self.spec.routing == "hash" else None
        if torch.compiler.is_compiling():
            dtype = hidden_states.dtype
            return compiled.block(self, WholeBlock.run, hidden_states, ids, dtype)
        return self.run(hidden_states, ids)

    def run(self, hidden_states: Tensor, input_ids: Tensor | None = None) -> Tensor:
        """The call itself, not traced."""
        storage.refuse_gradients(self.block, hidden_states)
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        layer = self.layer
        if isinstance(layer, DenseMLP):
            y = layer(rows)
        elif self.spec.routing == "hash":
            y = layer(rows, token_ids=self._token_ids(hidden_states, input_ids))
        else:
            y = layer(rows)
        return y.view(hidden_states.shape)  # type: ignore[no-any-return]

    def _token_ids(self, hidden_states: Tensor, input_ids: Tensor | None) -> Tensor:
        if input_ids is None:
            raise ConfigError(
                f"layer {self.spec.layer} routes by token id and got no input_ids; "
                "inputs_embeds alone are not enough"
            )
        if input_ids.shape != hidden_states.shape[:-1]:
            raise ConfigError(
                f"input_ids have shape {tuple(input_ids.shape)}; "
                f"allowed: {tuple(hidden_states.shape[:-1])}"
            )
        return input_ids.reshape(-1)

    def move(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Stands in `block._apply`: parameters may move, but no dtype changes (field fault A16)."""
        self.to_canonical()
        return storage.move_bytes(self.block, fn, recurse)

    def to_canonical(self) -> None:
        """Put the experts' parameters in the order of the checkpoint, until the next call."""
        self._cache.to_canonical()

    # What stands in the experts module of the block: its parameters' readers get canonical order.

    def move_experts(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """In `experts._apply`."""
        self.to_canonical()
        return type(self.block.experts)._apply(self.block.experts, fn, recurse)  # type: ignore

    def experts_state(self) -> dict[str, Any]:
        """In `experts.__getstate__`: of a copy or a pickle."""
        self.to_canonical()
        return dict(self.block.experts.__dict__)

    def convert_state_dict(
        self, experts: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any
    ) -> None:
        """Hook after `experts.state_dict`: copies in host memory where the order is another one."""
        is_split = len(storage.card_modules(experts)) > 1
        bank = self.layer.bank if is_split else self._cache.arranged
        if bank is None or _raw:
            return
        copies = storage.whole_parameters(experts, bank)
        for name in [n for n in state_dict if storage.is_of_a_card(n, prefix)]:
            del state_dict[name]
        state_dict.update({prefix + name: copy for name, copy in copies.items()})

    def before_load(
        self, experts: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any
    ) -> None:
        """Hook before `experts.load_state_dict`."""
        self.to_canonical()
        if self.options.partition is not None:
            storage.split_state(experts, self.options.partition, state_dict, prefix)


# While it is not empty, state dicts hold the parameters as they are.
_raw: list[None] = []


@contextmanager
def raw_state_dicts() -> Iterator[None]:
    """State dicts without converted copies, for somebody who doesn't read the experts in them."""
    _raw.append(None)
    try:
        yield
    finally:
        _raw.pop()


def attach(block: nn.Module, spec: LayerSpec, options: Options) -> None:
    """Let our layer run the block from now on. It is built at once, so its errors are met here."""
    whole = WholeBlock(block, spec, options)
    setattr(block, _MARK, whole)
    block.forward = whole  # type: ignore[method-assign]
    block._apply = MethodType(WholeBlock.move, whole)  # type: ignore[method-assign]
    if spec.moe is not None:
        experts: Any = block.experts
        experts._apply = MethodType(WholeBlock.move_experts, whole)
        experts.__getstate__ = MethodType(WholeBlock.experts_state, whole)
        experts.register_state_dict_post_hook(partial(WholeBlock.convert_state_dict, whole))
        experts.register_load_state_dict_pre_hook(MethodType(WholeBlock.before_load, whole))
    _ = whole.layer


def attach_all(model: Any, specs: Iterable[LayerSpec], options: Options) -> None:
    """Let our layers run all MLP blocks of a model, one spec a decoder layer.

    Raises:
        CheckpointError: an id in the table of a hash layer that no expert has; names the tensor.
    """
    for layer, spec in zip(adapter.decoder_layers(model), specs, strict=True):
        try:
            attach(layer.get_submodule("mlp"), spec, options)
        except ConfigError as error:
            if not str(error).startswith("table row"):
                raise
            name = f"{spec.names.router_table} (layer {spec.layer})"
            raise CheckpointError(f"{name}: {error}") from error
    model.register_forward_pre_hook(_refuse_router_logits, with_kwargs=True)


def _refuse_router_logits(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """transformers takes them from a hook on the gate modules, which a whole block never calls."""
    asked = kwargs.get("output_router_logits")
    if asked is None:
        asked = getattr(model.config.get_text_config(), "output_router_logits", False)
    if asked:
        raise Unsupported(
            "output_router_logits is True; allowed: False (routers run inside blocks)"
        )


def blocks(model: nn.Module) -> list[tuple[int, nn.Module, MoELayer | DenseMLP]]:
    """(layer index, block module, our layer) of every MLP block that runs here, in order."""
    found = [
        (whole.spec.layer, module, whole.layer)
        for module in model.modules()
        if (whole := _whole(module)) is not None
    ]
    return sorted(found, key=lambda item: item[0])


def _whole(module: nn.Module) -> WholeBlock | None:
    whole: Any = getattr(module, _MARK, None)
    return whole if isinstance(whole, WholeBlock) else None


def to_canonical(model: nn.Module) -> None:
    """Put the experts of all blocks in the order of the checkpoint, in place, before somebody reads
    or writes the parameters themselves. The next call on backend "cuda" rearranges them.
    """
    for module in model.modules():
        if (whole := _whole(module)) is not None:
            whole.to_canonical()


__all__ = [
    "Options",
    "WholeBlock",
    "attach",
    "attach_all",
    "blocks",
    "raw_state_dicts",
    "to_canonical",
]
