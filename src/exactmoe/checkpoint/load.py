"""The weights of one MLP block, read from a checkpoint: only the tensors that the block needs."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from exactmoe.bank import ExpertBank, Partition, Router, SplitBank
from exactmoe.checkpoint.index import Checkpoint
from exactmoe.checkpoint.plan import LayerPlan
from exactmoe.checkpoint.planner import plan_layer
from exactmoe.checkpoint.quantize import Quantization, read_quantized, require_bf16_experts
from exactmoe.checkpoint.reader import Progress, Reader
from exactmoe.config import MoEConfig
from exactmoe.errors import CheckpointError, ConfigError
from exactmoe.formats import PackedWeight


@dataclass(frozen=True)
class DenseWeights:
    """A dense MLP or a shared expert: gate and up [1, I, H], down [1, H, I], of any format."""

    gate: PackedWeight
    up: PackedWeight
    down: PackedWeight
    swiglu_limit: float | None

    @property
    def nbytes(self) -> int:
        """Bytes of the three weights."""
        return self.gate.nbytes + self.up.nbytes + self.down.nbytes


@dataclass(frozen=True)
class MoEWeights:
    """A MoE block: routed experts, router, shared expert (None: the model has none).

    The bank holds all experts, on one card or split over several; or those of one share.
    """

    config: MoEConfig
    bank: ExpertBank | SplitBank
    router: Router
    shared: DenseWeights | None


@dataclass(frozen=True)
class Share:
    """What a card takes of a layer's routed experts.

    Attributes:
        device: of the card.
        experts: ids, ascending; None: all.
    """

    device: torch.device
    experts: tuple[int, ...] | None = None


HOST = Share(torch.device("cpu"))


def shares_of(partition: Partition, devices: Sequence[torch.device]) -> tuple[Share, ...]:
    """The share of each card."""
    partition.require(partition.num_experts, len(devices))
    return tuple(map(Share, devices, partition.experts))


def read_layer(
    checkpoint: Checkpoint,
    layer: int,
    progress: Progress | None = None,
    quantization: Quantization | None = None,
    shares: Sequence[Share] = (HOST,),
) -> MoEWeights | DenseWeights:
    """Reads one layer, whatever its kind: from the files to the memory of its cards.

    Args:
        checkpoint: the folder, opened.
        layer: index of the layer; those after the last one are multi-token prediction layers.
        progress: called with the bytes of every read, from one thread at a time.
        quantization: how BF16 routed experts are quantised; None: as they are stored.
        shares: of the cards; everything but routed experts goes to the first. Experts that are in
            no share are not read: one share of some experts gives a bank of those alone.

    Raises:
        CheckpointError: a tensor of the block is missing, malformed or unexpected, or a value in it
            is refused; the message names file and tensor.
        Unsupported: legal values that cannot be run, named alike.
        ConfigError: the model has no such layer, or its experts are no BF16 to quantise.
    """
    plan = plan_layer(checkpoint, layer)
    plan.require_complete()
    if quantization is not None:
        require_bf16_experts(plan, quantization)
    device = shares[0].device
    with Reader(checkpoint, progress) as reader:
        if plan.spec.moe is None:
            return _dense(reader, plan, device)
        return MoEWeights(
            config=plan.spec.moe,
            bank=_banks(reader, plan, quantization, shares),
            router=_router(reader, plan).to(device),
            shared=_dense(reader, plan, device),
        )


def read_moe(checkpoint: Checkpoint, layer: int, progress: Progress | None = None) -> MoEWeights:
    """Reads a MoE layer, as `read_layer`; ConfigError when the layer is dense."""
    _require_kind(checkpoint, layer, "moe")
    weights = read_layer(checkpoint, layer, progress)
    assert isinstance(weights, MoEWeights)
    return weights


def read_dense(
    checkpoint: Checkpoint, layer: int, progress: Progress | None = None
) -> DenseWeights:
    """Reads a dense layer, as `read_layer`; ConfigError when the layer is MoE."""
    _require_kind(checkpoint, layer, "dense")
    weights = read_layer(checkpoint, layer, progress)
    assert isinstance(weights, DenseWeights)
    return weights


def _require_kind(checkpoint: Checkpoint, layer: int, kind: str) -> None:
    found = checkpoint.family.layer(layer).kind
    if found != kind:
        raise ConfigError(f"layer {layer} is {found}; asked for: {kind}")


def _banks(
    reader: Reader,
    plan: LayerPlan,
    quantization: Quantization | None,
    shares: Sequence[Share],
) -> ExpertBank | SplitBank:
    if quantization is None:
        # All cards are begun before the first is looked at: values are checked while others come.
        begun = [reader.begin(plan.experts, share.experts, share.device) for share in shares]
        weights = [{n: pending.finish() for n, pending in each.items()} for each in begun]
    else:
        weights = [
            {
                name: read_quantized(reader, weight, quantization, share.experts, share.device)
                for name, weight in plan.experts.items()
            }
            for share in shares
        ]
    banks = [ExpertBank(each["gate"], each["up"], each["down"]) for each in weights]
    if len(banks) == 1:
        return banks[0]
    num_experts = len(plan.experts["gate"].sources)
    owned = [share.experts or () for share in shares]
    return SplitBank(banks, Partition.of_lists(owned, num_experts))


def _dense(reader: Reader, plan: LayerPlan, device: torch.device) -> DenseWeights:
    begun = reader.begin(plan.dense, None, device)
    weights = {name: pending.finish() for name, pending in begun.items()}
    return DenseWeights(**weights, swiglu_limit=plan.spec.swiglu_limit)


def _router(reader: Reader, plan: LayerPlan) -> Router:
    if plan.spec.router is None:
        raise ConfigError(f"layer {plan.spec.layer} is {plan.spec.kind}; it has no router")
    tensors = {name: reader.tensor(info) for name, info in plan.router.items()}
    bias, table = tensors.get("bias"), tensors.get("table")
    try:
        return Router(
            tensors["weight"],
            bias=None if bias is None else bias.to(torch.float32),
            table=table,
            config=plan.spec.router,
        )
    except ConfigError as error:
        # The dtypes and shapes were checked with the headers; what is left is an id in the table.
        info = plan.router["weight" if table is None else "table"]
        where = f"{info.file}: {info.name} (layer {plan.spec.layer})"
        raise CheckpointError(f"{where}: {error}") from error
