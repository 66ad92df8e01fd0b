"""Cards: how many there are, which of them owns which expert, and what they send back."""

from collections.abc import Iterator

import torch
from torch import Tensor

from exactmoe.bank import ExpertBank, Partition, SplitBank
from exactmoe.config import Placement
from exactmoe.dense import DenseMLP
from exactmoe.layer import MoELayer
from exactmoe.proof.batch import Batch, Entry
from exactmoe.proof.trial import Trial
from exactmoe.runtime.workspace import captures_alive, release_captures

_STREAM = 170
_WIDTHS = (1, 6, 65)
_LARGE = 1 << 30


def cards(trial: Trial) -> None:
    """The layer's experts on one card against several, with every way to return, eager and on a
    GPU in a graph; and the layer as it is, if it is on several. Router and shared expert are
    shared. Memory: the experts once more.

    Cards of a GPU are streams of it, or GPUs where the layer is on several.
    """
    layer = trial.entry.layer
    if isinstance(layer, DenseMLP):
        trial.cannot_run("cards", "a dense MLP runs on one card")
        return
    whole = layer.bank.join() if isinstance(layer.bank, SplitBank) else layer.bank
    alone = Entry(trial.entry.name, _twin(layer, whole, None))
    batches = [trial.random(tokens, _STREAM) for tokens in _WIDTHS]
    expected = [alone(batch) for batch in batches]
    if layer.cards is not None:
        for batch, wanted in zip(batches, expected, strict=True):
            trial.compare("cards", "as it is", wanted, trial.run(batch))
    on_gpu = layer.device.type == "cuda"
    stream = torch.cuda.Stream(layer.device) if on_gpu and not layer.limits.checks else None
    keep_graphs = captures_alive(layer.device)
    for case, twin in _twins(layer, whole):
        entry = Entry(trial.entry.name, twin)
        for batch, wanted in zip(batches, expected, strict=True):
            trial.compare("cards", case, wanted, entry(batch))
            if stream is not None:
                trial.compare("cards", f"{case}, captured", wanted, _replayed(entry, batch, stream))
        twin.check()
        if on_gpu and not keep_graphs:
            release_captures(layer.device)  # ours are gone


def _replayed(entry: Entry, batch: Batch, stream: torch.cuda.Stream) -> Tensor:
    """What a graph of the call gives."""
    device = entry.layer.device
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        entry(batch)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        y = entry(batch)
    y.fill_(float("nan"))
    graph.replay()
    found = y.clone()
    torch.cuda.synchronize(device)  # the graph may go
    return found


def _twins(layer: MoELayer, whole: ExpertBank) -> Iterator[tuple[str, MoELayer]]:
    """The layer on every placement, with each return. Of large layers, whose bytes are read back
    for each placement, on two and in one schedule.
    """
    devices, large = layer.devices, whole.nbytes > _LARGE
    found = placements(layer.config.num_experts)
    for partition in (found[0], found[-1]) if large and found else found:
        names = tuple(str(devices[card % len(devices)]) for card in range(partition.num_cards))
        split = whole.split(partition, names, keep=True)
        for returns in ("slots", "partials") if partition.is_aligned else ("slots",):
            for serial in (False,) if large else (False, True):
                placement = Placement(names, partition.owners, returns, serial)
                case = f"{partition.num_cards} cards, {partition.rule}, {returns}"
                yield case + ", serial" * serial, _twin(layer, split, placement)


def placements(num_experts: int) -> list[Partition]:
    """Even over 2 to 8 cards, the halves exchanged, every other expert: while there are experts."""
    if num_experts < 2:
        return []
    found = [Partition.even(num_experts, cards) for cards in (2, 3, 4, 8) if cards <= num_experts]
    found.append(Partition.halves(num_experts, 1))
    owners = tuple(expert % 2 for expert in range(num_experts))
    return [*found, Partition(owners, "every other expert")]


def _twin(layer: MoELayer, bank: ExpertBank | SplitBank, placement: Placement | None) -> MoELayer:
    return MoELayer(
        layer.config,
        bank,
        layer.router,
        layer.shared,
        placement,
        limits=layer.limits,
        backend=layer.backend,
    )
