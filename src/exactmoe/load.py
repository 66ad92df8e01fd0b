"""load_layer: one MLP block of a checkpoint as a layer that runs."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from exactmoe.bank import Partition, SplitBank
from exactmoe.checkpoint import (
    Checkpoint,
    DenseWeights,
    MoEWeights,
    Progress,
    Quantization,
    Share,
    plan_layer,
    read_layer,
    shares_of,
)
from exactmoe.checkpoint.model_bytes import of_layer
from exactmoe.config import Limits, Numerics, Placement, checked_limits
from exactmoe.dense import DenseMLP
from exactmoe.errors import ConfigError
from exactmoe.fitting import partition_for
from exactmoe.layer import MoELayer
from exactmoe.parallel.placement import devices_of, partition_of


def load_layer(
    path: str | Path,
    layer: int,
    *,
    cards: Sequence[str] | Placement = ("cpu",),
    numerics: Numerics | str | None = None,
    limits: Limits | None = None,
    backend: str = "auto",
    progress: Progress | None = None,
    quantize: str | Quantization | None = None,
) -> MoELayer | DenseMLP:
    """Loads one layer of a checkpoint; only its tensors are read, each by the card that owns it.

    Args:
        path: folder with config.json and safetensors files.
        layer: index of the layer. The multi-token prediction layers that the checkpoint has come
            after the last layer.
        cards: device names, or a Placement, which says who owns which expert too; a dense layer
            lives on the first.
        numerics: None: the family's class (glm5_next a16, deepseek_v4 a8).
        limits: tokens a piece, checks.
        backend: "auto", or a name of plan.BACKENDS. On one device all give the same bits.
        progress: called with the bytes of every read, from one thread at a time.
        quantize: "nvfp4", "mxfp4" or a Quantization with its rule: BF16 routed experts are
            quantised one by one while they are read. None: every weight as it is stored.

    Returns:
        A MoELayer, or a DenseMLP where the model has a dense layer.

    Raises:
        CheckpointError: something is missing, malformed or unexpected; names file and tensor.
        ConfigError: config.json or an argument holds a value that is not allowed.
        Unsupported: well formed, but nothing here can run it; or a card has no room for it, which
            says how much is asked for and free.
    """
    placement = cards if isinstance(cards, Placement) else Placement(cards=cards)
    devices = devices_of(placement)
    if not isinstance(layer, int) or isinstance(layer, bool):
        raise ConfigError(f"layer is {layer!r}; allowed: an integer, the index of a layer")
    limits = checked_limits(limits)
    quantization = None if quantize is None else Quantization.of(quantize)
    checkpoint = Checkpoint(path, numerics)
    partition = _partition(checkpoint, layer, placement, devices, limits)
    shares = (Share(devices[0]),) if partition is None else shares_of(partition, devices)
    weights = read_layer(checkpoint, layer, progress, quantization, shares)
    if isinstance(weights, DenseWeights):
        return _dense(weights, limits, backend, checkpoint.family.numerics.output)
    if partition is not None:
        weights = replace(weights, bank=SplitBank(list(weights.bank), partition))
    return make_layer(weights, replace(placement, partition=None), limits, backend)


def _partition(
    checkpoint: Checkpoint,
    layer: int,
    placement: Placement,
    devices: Sequence[torch.device],
    limits: Limits | None,
) -> Partition | None:
    """Who owns which expert of a layer; None where all is on one card."""
    moe = checkpoint.family.layer(layer).moe
    if moe is None or len(devices) == 1:
        return None
    if placement.partition != "fit":
        return partition_of(placement, moe.num_experts)
    plan = plan_layer(checkpoint, layer)
    plan.require_complete()
    model = of_layer(str(checkpoint.path), plan)
    return partition_for(model, placement, devices, limits, 0)


def _dense(weights: DenseWeights, limits: Limits | None, backend: str, output: str) -> DenseMLP:
    return DenseMLP(
        weights.gate,
        weights.up,
        weights.down,
        swiglu_limit=weights.swiglu_limit,
        limits=limits,
        backend=backend,
        output=output,
    )


def make_layer(
    weights: MoEWeights,
    placement: Placement,
    limits: Limits | None = None,
    backend: str = "auto",
) -> MoELayer:
    """A layer over weights that were read to the cards of the placement; on backend "cuda" their
    bytes are put into the order of its kernels, in place.
    """
    shared = None
    if weights.shared is not None:
        shared = _dense(weights.shared, limits, backend, "bf16")
    return MoELayer(
        weights.config,
        weights.bank,
        router=weights.router,
        shared=shared,
        placement=placement,
        limits=limits,
        backend=backend,
    )
