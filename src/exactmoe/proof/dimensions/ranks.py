"""Ranks: how many processes hold the experts, whose tokens they are, and what comes back."""

from collections.abc import Iterator

from torch import Tensor

from exactmoe.dense import DenseMLP
from exactmoe.layer import MoELayer
from exactmoe.parallel.rank_bank import RankBank
from exactmoe.parallel.rank_wire import RankWire
from exactmoe.parallel.ranks import Ranks
from exactmoe.proof.batch import Batch, Entry
from exactmoe.proof.trial import Trial
from exactmoe.ranked import RankedLayer
from exactmoe.ranked_dense import RankedDense

_STREAM = 190
_WIDTHS = (1, 6, 65)
# Dimensions that a layer over ranks does not run.
_ALONE = {
    "cards": "its experts lie over ranks, with one card each",
    "callers": "calls over ranks have one order on every rank",
    "streams": "calls over ranks have one order on every rank",
    "levers": "ranks run all tokens at once",
    "stages": "they are proved of a layer in one process",
}
_GPU_ALONE = {"backend": "a GPU's paths are compared for a layer in one process"}


def ranks(trial: Trial) -> None:
    """The layer over ranks against the same one in one process, on every rank; what another rank
    got; with each return, and with tokens of each rank's own. Memory: all experts, as one process
    has them.
    """
    layer = trial.entry.layer
    if not isinstance(layer, RankedLayer | RankedDense):
        trial.cannot_run("ranks", "it is in one process; torchrun starts several (docs/ranks.md)")
        return
    alone = Entry(trial.entry.name, layer.alone())
    batches = [trial.random(tokens, _STREAM) for tokens in _WIDTHS]
    expected = [alone(batch) for batch in batches]
    group = layer.wire.ranks if isinstance(layer, RankedLayer) else layer.ranks
    for batch, wanted in zip(batches, expected, strict=True):
        for rank, y in enumerate(_of_all(group, trial.run(batch))):
            trial.compare("ranks", f"as it is, y of rank {rank}", wanted, y)
    if not isinstance(layer, RankedLayer):
        return
    for case, twin in _twins(layer):
        entry = Entry(trial.entry.name, twin)
        for batch, wanted in zip(batches, expected, strict=True):
            trial.compare("ranks", case, wanted, entry(batch))
        twin.check()
    _own_tokens(trial, layer, alone)


def not_over_ranks(layer: MoELayer | DenseMLP, dimension: str) -> str | None:
    """Why a dimension does not run for a layer over ranks; None: it runs."""
    if not isinstance(layer, RankedLayer | RankedDense):
        return None
    found = _ALONE if layer.device.type == "cpu" else _ALONE | _GPU_ALONE
    return found.get(dimension)


def _of_all(group: Ranks, y: Tensor) -> Tensor:
    """y of each rank, [R, T, H]."""
    found = y.new_empty(group.size, *y.shape)
    group.all_gather(y, found)
    return found


def _ways(layer: RankedLayer) -> tuple[str, ...]:
    return ("slots", "partials") if layer.wire.partition.is_aligned else ("slots",)


def _twins(layer: RankedLayer) -> Iterator[tuple[str, RankedLayer]]:
    """The layer over the same experts with every return."""
    for returns in _ways(layer):
        yield returns, _twin(layer, "replicated", returns, layer.shared)


def _own_tokens(trial: Trial, layer: RankedLayer, alone: Entry) -> None:
    """Each rank's own tokens, among them ranks without any; the shared expert is whole."""
    assert isinstance(alone.layer, MoELayer)
    group = layer.wire.ranks
    for returns in _ways(layer):
        twin = _twin(layer, "own", returns, alone.layer.shared)
        for tokens in _WIDTHS:
            batch = trial.random(tokens, _STREAM + 1)
            share = -(-tokens // max(group.size - 1, 1))
            start = min(group.rank * share, tokens)
            own = batch.rows(slice(start, min(start + share, tokens)))
            found = _own_call(twin, alone.name, own, share)
            trial.compare("ranks", f"own tokens, {returns}", alone(own), found)


def _own_call(twin: RankedLayer, entry: str, own: Batch, width: int) -> Tensor:
    if entry == "block":
        return twin(own.x, own.token_ids, width=width)
    assert own.expert_ids is not None and own.weights is not None
    return twin.experts(own.x, own.expert_ids, own.weights, width=width)


def _twin(layer: RankedLayer, tokens: str, returns: str, shared: DenseMLP | None) -> RankedLayer:
    """Over the same experts and ranks."""
    wire, experts = layer.wire, layer.config.num_experts
    other = RankWire(wire.ranks, experts, wire.partition, tokens, returns)
    bank, settings = RankBank(layer.bank.own, other), (layer.limits, layer.backend)
    return RankedLayer(layer.config, bank, other, layer.router, shared, *settings)
