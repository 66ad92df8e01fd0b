"""load_layer: one MLP block of a checkpoint as a layer that runs."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from exactmoe.bank import ExpertBank, SplitBank
from exactmoe.checkpoint import (
    Checkpoint,
    DenseWeights,
    MoEWeights,
    Progress,
    Quantization,
    read_layer,
)
from exactmoe.config import Limits, Numerics, Placement
from exactmoe.dense import DenseMLP
from exactmoe.errors import ConfigError
from exactmoe.formats import PackedWeight
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
    """Loads one layer of a checkpoint; only its tensors are read.

    Args:
        path: folder with config.json and safetensors files.
        layer: index of the layer. The multi-token prediction layers that the checkpoint has come
            after the last layer.
        cards: device names, or a Placement, which says who owns which expert too; a dense layer
            lives on the first.
        numerics: None: the family's class (glm5_next a16, deepseek_v4 a8).
        limits: tokens a piece, checks.
        backend: "auto", or a name of plan.BACKENDS. On one device all give the same bits.
        progress: called with the bytes of every read, on the thread that reads.
        quantize: "nvfp4", "mxfp4" or a Quantization with its rule: BF16 routed experts are
            quantised one by one while they are read. None: every weight as it is stored.

    Returns:
        A MoELayer, or a DenseMLP where the model has a dense layer.

    Raises:
        CheckpointError: something is missing, malformed or unexpected; names file and tensor.
        ConfigError: config.json or an argument holds a value that is not allowed.
        Unsupported: well formed, but nothing here can run it.
    """
    placement = cards if isinstance(cards, Placement) else Placement(cards=cards)
    device = devices_of(placement)[0]
    if not isinstance(layer, int) or isinstance(layer, bool):
        raise ConfigError(f"layer is {layer!r}; allowed: an integer, the index of a layer")
    quantization = None if quantize is None else Quantization.of(quantize)
    checkpoint = Checkpoint(path, numerics)
    weights = read_layer(checkpoint, layer, progress, quantization)
    output = checkpoint.family.numerics.output
    if isinstance(weights, DenseWeights):
        return _dense(weights, limits, backend, output, device)
    return _moe(weights, placement, limits, backend)


def _dense(
    weights: DenseWeights,
    limits: Limits | None,
    backend: str,
    output: str,
    device: torch.device,
) -> DenseMLP:
    return DenseMLP(
        _moved(weights.gate, device),
        _moved(weights.up, device),
        _moved(weights.down, device),
        swiglu_limit=weights.swiglu_limit,
        limits=limits,
        backend=backend,
        output=output,
    )


def _moved(weight: PackedWeight, device: torch.device) -> PackedWeight:
    scales, global_scale = (
        None if part is None else part.to(device) for part in (weight.scales, weight.global_scale)
    )
    codes = weight.codes.to(device)
    return replace(weight, codes=codes, scales=scales, global_scale=global_scale)


def _moe(
    weights: MoEWeights, placement: Placement, limits: Limits | None, backend: str
) -> MoELayer:
    devices, shared = devices_of(placement), None
    if weights.shared is not None:
        shared = _dense(weights.shared, limits, backend, "bf16", devices[0])
    bank: ExpertBank | SplitBank
    if len(devices) == 1:
        bank = weights.bank.to(devices[0])
    else:
        bank = weights.bank.split(partition_of(placement, weights.bank.num_experts), devices)
    return MoELayer(
        weights.config,
        bank,
        router=weights.router.to(devices[0]),
        shared=shared,
        placement=placement,
        limits=limits,
        backend=backend,
    )
