"""A model over ranks: every rank holds attention, norms and routers whole and its own experts; the
tokens of a call are the same on all of them.

Shared experts and dense MLPs are cut by output rows where they can be: each rank keeps its rows.
"""

import json
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn

from exactmoe.checkpoint import Checkpoint, LayerPlan, Share
from exactmoe.config import Limits, Placement
from exactmoe.dense import DenseMLP
from exactmoe.errors import ConfigError, Unsupported
from exactmoe.families import LayerSpec
from exactmoe.formats import PackedWeight
from exactmoe.hf import storage
from exactmoe.layer import MoELayer
from exactmoe.parallel.rank_bank import RankBank, program_facts
from exactmoe.parallel.rank_wire import RankPlacement
from exactmoe.parallel.ranks import Ranks
from exactmoe.parallel.row_cut import RowCut
from exactmoe.ranked import RankedLayer
from exactmoe.ranked_dense import RankedDense, cuts

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def placement_of(ranks: str | Ranks | RankPlacement, cards: Placement) -> RankPlacement:
    """What a caller means by `ranks`.

    Args:
        ranks: "auto": those that torchrun started; or given ones.
        cards: one device of this process; "cuda" is the GPU with this rank's number.

    Raises:
        ConfigError: another text, or no group (Ranks).
        Unsupported: several cards in a rank, or what a RankPlacement says.
    """
    if len(cards.cards) != 1 or cards != Placement(cards.cards):
        raise Unsupported(
            f"ranks were asked for with {cards}; allowed: one card a rank; RankPlacement says "
            "partition and returns"
        )
    if ranks == "auto":
        ranks = Ranks.auto(cards.cards[0])
    if isinstance(ranks, Ranks):
        ranks = RankPlacement(ranks)
    if not isinstance(ranks, RankPlacement):
        raise ConfigError(f"ranks is {ranks!r}; allowed: 'auto', Ranks, RankPlacement, None")
    return ranks


def require_same_model(
    placement: RankPlacement, checkpoint: Checkpoint, plans: Sequence[LayerPlan]
) -> None:
    """ConfigError on every rank if they have other checkpoints or programs."""
    wire = placement.wire(num_experts_of(plans))
    tensors = [(t.name, t.dtype, tuple(t.shape)) for t in checkpoint.tensors.values()]
    headers = json.dumps([checkpoint.config, sorted(tensors)], sort_keys=True)
    facts = {
        "the checkpoint (config.json, names, dtypes, shapes)": sha256(headers.encode()).hexdigest(),
        **program_facts(wire),
        "the numerics": checkpoint.family.numerics.to_dict(),
        "cut_dense": placement.cut_dense,
    }
    placement.ranks.agree(f"load_model of {checkpoint.path.name}", facts)


def num_experts_of(plans: Iterable[LayerPlan]) -> int:
    """How many routed experts each MoE layer has. Unsupported: not one number."""
    counts = sorted({plan.spec.moe.num_experts for plan in plans if plan.spec.moe is not None})
    if len(counts) != 1:
        raise Unsupported(f"layers have {counts} routed experts; allowed over ranks: one number")
    return counts[0]


def own_share(placement: RankPlacement, plans: Sequence[LayerPlan]) -> tuple[Share, ...]:
    """The experts that this rank reads, of every layer."""
    wire = placement.wire(num_experts_of(plans))
    return (Share(placement.ranks.device, wire.experts),)


def bytes_read(placement: RankPlacement, plans: Sequence[LayerPlan], nbytes: int) -> int:
    """Of the bytes of all tensors, those that this rank reads."""
    experts, owned = num_experts_of(plans), len(own_share(placement, plans)[0].experts or ())
    routed = sum(
        info.nbytes for plan in plans for weight in plan.experts.values() for info in weight.tensors
    )
    return nbytes - routed + routed * owned // experts


def cut_dense(layers: nn.ModuleList, specs: Iterable[LayerSpec], placement: RankPlacement) -> None:
    """Leaves each rank its own output rows of shared experts and dense MLPs; the memory of all
    other rows goes.
    """
    for layer, spec in zip(layers, specs, strict=True):
        mlp = _dense_module(layer.get_submodule("mlp"), spec)
        cut = _cut_of(mlp, spec, placement)
        for name, rows in () if cut is None else zip(PROJECTIONS, (cut[0], *cut), strict=True):
            _keep_rows(mlp.get_submodule(name), rows, placement.ranks.rank)


def build(
    block: nn.Module,
    spec: LayerSpec,
    placement: RankPlacement,
    limits: Limits | None,
    backend: str,
) -> MoELayer | DenseMLP:
    """The layer of a block over ranks, over its parameters as `cut_dense` left them."""
    dense = _build_dense(_dense_module(block, spec), spec, placement, limits, backend)
    if spec.moe is None or spec.router is None:
        return dense
    wire = placement.wire(spec.moe.num_experts)
    return RankedLayer(
        spec.moe,
        RankBank(storage.bank(block.experts), wire),  # type: ignore[arg-type]
        router=storage.router(block.gate, spec.router),  # type: ignore[arg-type]
        shared=dense,
        limits=limits,
        backend=backend,
    )


def _dense_module(block: nn.Module, spec: LayerSpec) -> nn.Module:
    return block if spec.moe is None else block.get_submodule("shared_experts")


def _build_dense(
    mlp: nn.Module, spec: LayerSpec, placement: RankPlacement, limits: Limits | None, backend: str
) -> DenseMLP:
    cut = _cut_of(mlp, spec, placement)
    if cut is None:
        return storage.dense_mlp(mlp, spec.swiglu_limit, limits, backend)
    gate, up, down = (_packed(storage.linear_weight(mlp.get_submodule(n))) for n in PROJECTIONS)
    return RankedDense((gate, up, down), cut, placement.ranks, spec.swiglu_limit, limits, backend)


def _packed(weight: Tensor | PackedWeight) -> PackedWeight:
    return weight if isinstance(weight, PackedWeight) else PackedWeight("bf16", weight[None])


def _cut_of(
    mlp: nn.Module, spec: LayerSpec, placement: RankPlacement
) -> tuple[RowCut, RowCut] | None:
    """The same before and after `cut_dense`; None: whole on every rank."""
    if not placement.cut_dense or placement.ranks.size == 1:
        return None
    formats = [storage.linear_format(mlp.get_submodule(name)) for name in PROJECTIONS]
    inner = spec.intermediate_size if spec.moe is None else spec.shared_size
    assert inner is not None
    return cuts(formats, spec.hidden_size, inner, placement.ranks.size)


def _keep_rows(linear: nn.Module, cut: RowCut, rank: int) -> None:
    """Codes and block scales lose the other ranks' rows; a global scale is of all."""
    rows = cut.part(rank)
    for name, parameter in list(linear.named_parameters(recurse=False)):
        if parameter.ndim < 2:
            continue
        # A row of scales is of one row of codes, or of a block of them.
        block = -(-cut.rows // parameter.shape[0])
        kept = parameter.detach()[rows.start // block : -(-rows.stop // block)].clone()
        linear.register_parameter(name, nn.Parameter(kept, requires_grad=False))


class NotSaved:
    """In the place of hf.saving.Origin: a rank has only its part of the weights."""

    def __init__(self, placement: RankPlacement) -> None:
        self._placement = placement

    def __deepcopy__(self, memo: dict[int, Any]) -> "NotSaved":
        return self

    def state_dict(self, model: Any, conversions: list[Any]) -> dict[str, torch.Tensor]:
        raise Unsupported(
            f"the model lies over {self._placement.ranks.size} ranks, each with its own experts; "
            "allowed: to save one that was loaded without ranks"
        )
