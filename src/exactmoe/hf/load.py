"""load_model: a transformers model whose experts stay packed and whose MLP blocks run here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from exactmoe.checkpoint import (
    Checkpoint,
    LoadReport,
    Reader,
    WeightPlan,
    audit,
    plan_layer,
)
from exactmoe.checkpoint.linears import READ_BY_NOBODY, between_blocks, fp8_linears
from exactmoe.checkpoint.model_bytes import of_plans
from exactmoe.config import Limits, Numerics, Placement, checked_limits
from exactmoe.errors import CheckpointError, ConfigError, Unsupported
from exactmoe.fitting import partition_for
from exactmoe.hf import adapter, rank_blocks, whole_block
from exactmoe.hf.forms import stored_forms
from exactmoe.hf.hub import checkpoint_folder
from exactmoe.hf.linears import attach_linears
from exactmoe.hf.quantizer import PackedConfig
from exactmoe.hf.saving import Origin
from exactmoe.hf.streaming import fill_experts, lazy_tensors, shares_on
from exactmoe.parallel.placement import devices_of
from exactmoe.parallel.rank_wire import RankPlacement
from exactmoe.parallel.ranks import Ranks
from exactmoe.runtime.progress import byte_bar

_PLAIN = frozenset({"BF16", "F32", "I64", "I32"})
_SHOWN = 10


@dataclass(frozen=True)
class _Settings:
    """What load_model was asked for."""

    placement: Placement
    numerics: Numerics | str | None
    limits: Limits | None
    backend: str
    kv_reserve: int | str | Sequence[int | str]
    progress: bool


def load_model(
    path: str | Path,
    *,
    cards: Sequence[str] | Placement = ("cpu",),
    numerics: Numerics | str | None = None,
    limits: Limits | None = None,
    backend: str = "auto",
    kv_reserve: int | str | Sequence[int | str] = 0,
    progress: bool = True,
    ranks: str | Ranks | RankPlacement | None = None,
) -> Any:
    """Load a checkpoint as a transformers model for inference, its MLP blocks run here.

    Bytes go from the files to their final place, each card's experts to that card, read by several
    threads; what ends the load lets the memory go again.

    Args:
        path: a folder, or a hub id.
        cards: device names, or a Placement, which says who owns which expert too. Everything but
            routed experts is on the first card. By default experts are cut by the memory that is
            free on each card ("fit"); where all cards are one device, evenly, in place.
        numerics: "a16", "a8" or a Numerics (output "bf16"); None: the family's class (glm5_next
            a16, deepseek_v4 a8).
        limits: tokens a piece, checks.
        backend: "auto", or a name of plan.BACKENDS.
        kv_reserve: bytes ("8GiB") that "fit" keeps free for the KV cache: of the first card, where
            attention is, or one a card.
        progress: show a bar on stderr, where that is a terminal.
        ranks: "auto": over the processes that torchrun started (docs/ranks.md), with one card each;
            or a Ranks or RankPlacement. Every rank calls load_model, and then the model, alike.

    Returns:
        The model in eval mode, no parameter asking for a gradient. Packed weights stay packed: the
        experts' parameters hold the checkpoint's bytes. On backend "cuda" they hold them in the
        order of its kernels; a state dict, saving, copying and moving give the checkpoint's order.

    Raises:
        CheckpointError: a tensor is missing, malformed, or taken by nobody and ignored by no rule.
        ConfigError, Unsupported: a model or a request that cannot run here; or it does not fit, and
            the message says which card has how much, and what would fit.
        RankLost: another rank failed, died or does not answer.
    """
    placement = cards if isinstance(cards, Placement) else Placement(cards=cards)
    limits = checked_limits(limits)
    settings = _Settings(placement, numerics, limits, backend, kv_reserve, progress)
    if ranks is None:
        return _load(path, settings, devices_of(placement), None)
    over = rank_blocks.placement_of(ranks, placement)
    if kv_reserve != 0:
        raise Unsupported(
            f"kv_reserve is {kv_reserve!r}; allowed over ranks: 0 (experts are cut evenly, or as "
            "RankPlacement says)"
        )
    with over.ranks.together():
        settings = replace(settings, progress=progress and over.ranks.rank == 0)
        return _load(path, settings, [over.ranks.device], over)


def _load(
    path: str | Path,
    settings: _Settings,
    devices: Sequence[torch.device],
    over: RankPlacement | None,
) -> Any:
    placement, limits, backend = settings.placement, settings.limits, settings.backend
    folder = checkpoint_folder(path)
    checkpoint = Checkpoint(folder, settings.numerics)
    report = audit(checkpoint)
    report.require_clean()
    _require_bf16(checkpoint)
    linears = fp8_linears(between_blocks(report))
    _require_plain(report, linears)
    plans = [plan_layer(checkpoint, layer) for layer in range(checkpoint.family.num_layers)]
    partition = None
    if over is None:
        reserve = settings.kv_reserve
        partition = partition_for(of_plans(report, plans), placement, devices, limits, reserve)
        shares = shares_on(devices, partition)
    else:
        rank_blocks.require_same_model(over, checkpoint, plans)
        shares = rank_blocks.own_share(over, plans)
    suffixes = {base: _scales_suffix(plan) for base, plan in linears.items()}
    experts = {plan.spec.layer: f"{plan.spec.layer}.mlp.experts" for plan in plans if plan.experts}
    packed = PackedConfig(stored_forms(checkpoint, plans), suffixes, tuple(experts.values()))
    unread = _unread(report)
    nbytes = sum(info.nbytes for info in checkpoint.tensors.values() if info.name not in unread)
    if over is not None:
        nbytes = rank_blocks.bytes_read(over, plans, nbytes)
    with (
        byte_bar(settings.progress, nbytes, f"loading {folder.name}") as done,
        Reader(checkpoint, done) as reader,
        adapter.progress_bars(False),
    ):
        rest = lazy_tensors(reader, checkpoint, plans, unread, devices[0])
        config = adapter.read_config(str(folder))
        model, info = adapter.from_pretrained(folder, rest, config, packed, str(devices[0]))
        quantizer = model.hf_quantizer
        _require_complete(folder, info, quantizer.wrong_shapes(model))
        layers = adapter.decoder_layers(model)
        modules = {layer: layers.get_submodule(name) for layer, name in experts.items()}
        taken = {layer: quantizer.taken.pop(name) for layer, name in experts.items()}
        fill_experts(reader, modules, taken, plans, shares)
    fp8 = {name: linears[base] for name, base in quantizer.linears.items()}
    quantizer.origin = Origin(checkpoint, tuple(plans), unread, fp8)
    specs = [plan.spec for plan in plans]
    if over is not None:
        quantizer.origin = rank_blocks.NotSaved(over)
        rank_blocks.cut_dense(layers, specs, over)
    adapter.publish_quantization_config(model, checkpoint.config)
    model.requires_grad_(False)
    options = whole_block.Options(limits, backend, partition, placement, over)
    whole_block.attach_all(model, specs, options)
    attach_linears(model, fp8, options)
    return model


def _require_bf16(checkpoint: Checkpoint) -> None:
    """The model's rows are bf16: its config says so, and our blocks give them back so."""
    output = checkpoint.family.numerics.output
    if output != "bf16":
        raise ConfigError(f"numerics.output is {output!r}; a transformers model takes 'bf16'")
    for part in (checkpoint.config, checkpoint.config.get("text_config") or {}):
        dtype = part.get("dtype", part.get("torch_dtype"))
        if dtype not in (None, "bfloat16"):
            config = checkpoint.path / "config.json"
            raise Unsupported(f"{config}: dtype is {dtype!r}; allowed: 'bfloat16'")


def _require_plain(report: LoadReport, linears: Mapping[str, WeightPlan]) -> None:
    """What transformers reads must be unquantised, or an FP8 linear layer that runs here: it would
    take a code for the weight.
    """
    ours = {info.name for plan in linears.values() for info in plan.tensors}
    for info in between_blocks(report):
        if info.name not in ours and info.dtype not in _PLAIN:
            allowed = ", ".join(sorted(_PLAIN))
            raise Unsupported(
                f"{info} is left to transformers; allowed there: {allowed}, and linear layers in "
                "FP8 with a scale for each 128 x 128 block"
            )


def _scales_suffix(plan: WeightPlan) -> str:
    return next(part.suffix for part in plan.dialect.parts if part.field == "scales")


def _unread(report: LoadReport) -> frozenset[str]:
    """Names of the tensors that nobody reads."""
    ignored = report.ignored
    return frozenset(entry.info.name for entry in ignored if entry.rule.name in READ_BY_NOBODY)


def _require_complete(folder: Path, info: dict[str, Any], wrong_shapes: list[str]) -> None:
    """Every parameter was in the checkpoint, and every tensor found its parameter."""
    problems = [f"{key} is missing" for key in sorted(info["missing_keys"])]
    problems += [f"{key} is no parameter" for key in sorted(info["unexpected_keys"])]
    problems += [
        f"{key} is {tuple(found)}, the model asks for {tuple(asked)}"
        for key, found, asked in sorted(info["mismatched_keys"])
    ]
    problems += wrong_shapes
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise CheckpointError(
            f"{folder} and the model of transformers disagree: {'; '.join(problems[:_SHOWN])}{more}"
        )
