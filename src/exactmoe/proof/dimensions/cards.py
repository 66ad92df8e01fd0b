"""Cards: how many there are, which of them owns which expert, and what they send back."""

from collections.abc import Iterator

from exactmoe.bank import ExpertBank, Partition, SplitBank
from exactmoe.config import Placement
from exactmoe.dense import DenseMLP
from exactmoe.layer import MoELayer
from exactmoe.proof.batch import Entry
from exactmoe.proof.trial import Trial

_STREAM = 170
_WIDTHS = (1, 6, 65)


def cards(trial: Trial) -> None:
    """The layer's experts on one card against several, with every way to return; and the layer as
    it is, if it is on several. Router and shared expert are shared. Memory: the experts once more.
    """
    layer = trial.entry.layer
    if isinstance(layer, DenseMLP):
        trial.cannot_run("cards", "a dense MLP runs on one card")
        return
    if layer.device.type != "cpu":
        trial.cannot_run("cards", "several cards are all cpu in this version")
        return
    whole = layer.bank.join() if isinstance(layer.bank, SplitBank) else layer.bank
    alone = Entry(trial.entry.name, _twin(layer, whole, None))
    batches = [trial.random(tokens, _STREAM) for tokens in _WIDTHS]
    expected = [alone(batch) for batch in batches]
    if layer.cards is not None:
        for batch, wanted in zip(batches, expected, strict=True):
            trial.compare("cards", "as it is", wanted, trial.run(batch))
    for case, twin in _twins(layer, whole):
        for batch, wanted in zip(batches, expected, strict=True):
            trial.compare("cards", case, wanted, Entry(trial.entry.name, twin)(batch))
        twin.check()


def _twins(layer: MoELayer, whole: ExpertBank) -> Iterator[tuple[str, MoELayer]]:
    """The layer on every placement, with each return."""
    for partition in placements(layer.config.num_experts):
        names = ("cpu",) * partition.num_cards
        split = whole.split(partition, names, keep=True)
        for returns in ("slots", "partials") if partition.is_aligned else ("slots",):
            for serial in (False, True):
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
