"""Bytes of each card in closed form, and who owns which expert so that a model fits; nothing runs.

Routed experts are cut over the cards, whole ones, the same cut in every layer (bank/placing.py).
Everything else lies on the first card.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from exactmoe.bank.partition import Partition
from exactmoe.bank.placing import fit
from exactmoe.checkpoint.model_bytes import ModelBytes
from exactmoe.config import Limits, Numerics, Placement
from exactmoe.dense import dense_regions
from exactmoe.errors import ConfigError, Unsupported
from exactmoe.families import LayerSpec
from exactmoe.layer import block_regions
from exactmoe.ops import Storage, gpu_storages
from exactmoe.parallel.cards import OWNER, Cards
from exactmoe.parallel.placement import partition_of
from exactmoe.routed import expert_regions
from exactmoe.runtime.free_memory import free_bytes
from exactmoe.runtime.sizes import gib, parse_bytes
from exactmoe.runtime.workspace import Region, total_bytes

# A process that replays graphs has one arena for calls and one for what it captured.
ARENAS = 2
_MOST_CARDS = 16
_UNKNOWN = 2**62


@dataclass(frozen=True)
class Setting:
    """What is asked for.

    Attributes:
        model: the model.
        free_bytes: of each card, before anything is loaded.
        rows: tokens a piece of a call.
        kv_reserve: bytes kept free on each card for the KV cache.
        other_bytes: of attention, embeddings and norms, on the first card.
    """

    model: ModelBytes
    free_bytes: tuple[int, ...]
    rows: int
    kv_reserve: tuple[int, ...]
    other_bytes: int


@dataclass(frozen=True)
class Card:
    """One card, in bytes; `left` is what the KV cache may take, and negative where it is over."""

    free: int
    experts: int
    dense: int
    other: int
    workspace: int
    kv_reserve: int

    @property
    def left(self) -> int:
        return self.free - self.experts - self.dense - self.other - self.workspace


@dataclass(frozen=True)
class ModelPlan:
    """The answer.

    Attributes:
        setting: what was asked.
        cards: bytes of each card; without a partition no expert is counted.
        partition: which card owns which expert, in every layer; None: it does not fit.
        missing: bytes that are missing in all, 0 where it fits.
        would_fit: changes that make it fit, one of them is enough.
    """

    setting: Setting
    cards: tuple[Card, ...]
    partition: Partition | None
    missing: int = 0
    would_fit: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        model, partition = self.setting.model, self.partition
        return {
            "model": model.name,
            "model_type": model.model_type,
            "source": model.source,
            "format": model.format,
            "routed_bytes": model.routed_bytes,
            "dense_bytes": model.mlp_bytes,
            "other_bytes": self.setting.other_bytes,
            "rows": self.setting.rows,
            "workspace_arenas": ARENAS,
            "fits": partition is not None,
            "missing_bytes": self.missing,
            "would_fit": list(self.would_fit),
            "cards": [{**card.__dict__, "left": card.left} for card in self.cards],
            "experts": None if partition is None else list(map(list, partition.experts)),
        }


def plan_model(setting: Setting) -> ModelPlan:
    """Bytes of each card, the partition by free bytes, and what would fit if it does not.

    Raises:
        ConfigError: the reserves are not one a card, or the layers differ in their experts.
    """
    plan = _placed(setting)
    if plan.partition is not None:
        return plan
    return replace(plan, would_fit=tuple(_changes(setting)))


def _placed(setting: Setting) -> ModelPlan:
    model, num_cards = setting.model, len(setting.free_bytes)
    if len(setting.kv_reserve) != num_cards:
        raise ConfigError(
            f"{len(setting.kv_reserve)} KV reserves for {num_cards} cards; allowed: one a card"
        )
    num_experts, each = experts_of(model)
    # Which card owns what is not known yet: as if each owned all experts, at most a few KiB more.
    planned = Partition.even(num_experts, num_cards)
    most = tuple(
        ARENAS * workspace_bytes(model, setting.rows, planned, card, num_experts)
        for card in range(num_cards)
    )
    cards = [
        Card(
            free=free,
            experts=0,
            dense=0 if card else model.mlp_bytes,
            other=0 if card else setting.other_bytes,
            workspace=most[card],
            kv_reserve=setting.kv_reserve[card],
        )
        for card, free in enumerate(setting.free_bytes)
    ]
    rooms = [card.left - card.kv_reserve for card in cards]
    # One expert in all layers is the unit that a card takes or leaves.
    short = max(0, num_experts * each - sum(max(room, 0) // each * each for room in rooms))
    short += sum(each - room for room in rooms if room < each)
    if short > 0:
        return ModelPlan(setting, tuple(cards), None, short)
    partition = fit(
        num_experts,
        each,
        setting.free_bytes,
        dense_bytes=[card.dense + card.other for card in cards],
        workspace_bytes=most,
        kv_reserve_bytes=setting.kv_reserve,
    )
    filled = [
        replace(
            card,
            experts=count * each,
            workspace=ARENAS * workspace_bytes(model, setting.rows, partition, number),
        )
        for number, (card, count) in enumerate(zip(cards, partition.counts, strict=True))
    ]
    return ModelPlan(setting, tuple(filled), partition)


def experts_of(model: ModelBytes) -> tuple[int, int]:
    """How many experts a layer has, and the bytes of one in all layers together."""
    counts = {layer.num_experts for layer in model.layers if layer.num_experts}
    if len(counts) != 1:
        raise ConfigError(
            f"{model.name} has layers of {sorted(counts)} routed experts; allowed: one number"
        )
    return counts.pop(), sum(layer.expert_bytes for layer in model.layers)


def workspace_bytes(
    model: ModelBytes, rows: int, partition: Partition, card: int, owned: int | None = None
) -> int:
    """Of one arena of a GPU for pieces of `rows` tokens: the most that a layer needs there on
    either GPU path. What cards send each other is in it, and answers are counted as slots.

    owned: experts that the card has room for; None: those of the partition.
    """
    count = partition.counts[card] if owned is None else owned
    kinds = {_sizes(layer.spec): layer.spec for layer in model.layers}
    return max(
        total_bytes(_regions(spec, rows, storage, partition, card, count))
        for spec in kinds.values()
        for storage in gpu_storages(_a8_units(spec))
    )


def _a8_units(spec: LayerSpec) -> str:
    return "" if spec.moe is None else Numerics.of(spec.moe.numerics).a8_units


def _sizes(spec: LayerSpec) -> tuple[object, ...]:
    """What decides the workspace of a layer."""
    return (spec.moe, spec.hidden_size, spec.intermediate_size, spec.shared_size)


def _regions(
    spec: LayerSpec, rows: int, storage: Storage, partition: Partition, card: int, owned: int
) -> list[Region]:
    """As MoELayer and DenseMLP lay them out; a peer has nothing but its experts' arrays."""
    if spec.moe is None:
        sizes = (spec.hidden_size, spec.intermediate_size)
        return dense_regions(*sizes, rows, storage) if card == OWNER else []
    regions = expert_regions(spec.moe, owned, rows, storage)
    if card == OWNER:
        regions += block_regions(spec.moe, spec.shared_size, rows, storage)
    if partition.num_cards > 1:
        devices = (torch.device("cpu"),) * partition.num_cards
        regions += Cards(partition, devices, "slots").regions(card, rows, spec.moe, storage)
    return regions


def _fits(setting: Setting) -> bool:
    return _placed(setting).partition is not None


def _changes(setting: Setting) -> Iterator[str]:
    """Each line is one change that is enough by itself."""
    free, cards = setting.free_bytes, len(setting.free_bytes)
    most = min(_MOST_CARDS, experts_of(setting.model)[0])
    for more in range(1, most - cards + 1):
        reserve = setting.kv_reserve + (0,) * more
        if _fits(replace(setting, free_bytes=free + free[-1:] * more, kv_reserve=reserve)):
            yield f"{cards + more} cards, the further ones of {gib(free[-1])}"
            break
    step = 2**30

    def larger(steps: int) -> Setting:
        return replace(setting, free_bytes=tuple(size + steps * step for size in free))

    steps = _least(lambda steps: _fits(larger(steps)), 4096)
    if steps is not None:
        yield f"{steps} GiB more on each card"
    if sum(setting.kv_reserve):

        def reduced(parts: int) -> Setting:
            kept = tuple(reserve * (64 - parts) // 64 for reserve in setting.kv_reserve)
            return replace(setting, kv_reserve=kept)

        parts = _least(lambda parts: _fits(reduced(parts)), 64)
        if parts is not None:
            kept = ", ".join(gib(size) for size in reduced(parts).kv_reserve)
            yield f"a KV reserve of {kept}"
    rows = setting.rows // 2
    while rows >= 1:
        if _fits(replace(setting, rows=rows)):
            yield f"--rows {rows}"
            break
        rows //= 2


def _least(holds: Callable[[int], bool], most: int) -> int | None:
    """The least number from 1 to `most` for which it holds; it holds for all above it."""
    if not holds(most):
        return None
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


def partition_for(
    model: ModelBytes,
    placement: Placement,
    devices: Sequence[torch.device],
    limits: Limits | None,
    kv_reserve: int | str | Sequence[int | str],
) -> Partition | None:
    """Who owns which expert of a model that is about to be loaded; None: there is one card.

    As the placement says; where it says nothing, by free memory, and evenly where all cards are one
    device.

    Raises:
        ConfigError: a partition or a reserve that is not allowed.
        Unsupported: the model does not fit; as `plan_cards`.
    """
    asked, one_device = placement.partition, len(set(devices)) == 1
    rows = max((limits or Limits()).rows_on(device) for device in devices)
    if len({layer.num_experts for layer in model.layers if layer.num_experts}) != 1:
        if len(devices) > 1:
            experts_of(model)  # raises
        return None
    num_experts, _ = experts_of(model)
    partition = None
    if asked == "even" or isinstance(asked, tuple) or (asked is None and one_device):
        partition = partition_of(placement, num_experts)
    if partition is not None and not one_device:
        _reserves(kv_reserve, len(devices))
        return partition
    plan = plan_cards(model, devices[:1] if partition else devices, rows, kv_reserve)
    return partition or plan.partition


def plan_cards(
    model: ModelBytes,
    devices: Sequence[torch.device],
    rows: int,
    kv_reserve: int | str | Sequence[int | str] = 0,
) -> ModelPlan:
    """The plan of a model on the cards of this process, by the memory that is free on them now.

    Args:
        model: its bytes.
        devices: of the cards; those of one device share its memory equally.
        rows: tokens a piece of a call.
        kv_reserve: bytes ("8GiB") kept free for the KV cache: of the first card, where attention
            is, or one a card.

    Raises:
        ConfigError: a reserve that is not allowed.
        Unsupported: it does not fit; says what is free on which card, how much is missing, and what
            would fit.
    """
    free = []
    for device in devices:
        found = free_bytes(device)
        # Where nobody says how much there is, a failed allocation will.
        free.append(_UNKNOWN if found is None else found // list(devices).count(device))
    reserves = _reserves(kv_reserve, len(free))
    setting = Setting(model, tuple(free), rows, reserves, model.other_bytes or 0)
    plan = plan_model(setting)
    if plan.partition is None:
        raise Unsupported(_no_fit(plan, devices))
    return plan


def _reserves(asked: int | str | Sequence[int | str], num_cards: int) -> tuple[int, ...]:
    given = asked
    if isinstance(given, (int, str)):
        given = (given, *(0,) * (num_cards - 1))
    given = given if isinstance(given, Sequence) else ()
    found = [parse_bytes("kv_reserve", v) if isinstance(v, str) else v for v in given]
    good = all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in found)
    if not good or len(found) != num_cards:
        raise ConfigError(
            f"kv_reserve is {asked!r}; allowed: bytes from 0, or text such as '8GiB', of the first "
            f"card, or one for each of {num_cards}"
        )
    return tuple(found)


def _no_fit(plan: ModelPlan, devices: Sequence[torch.device]) -> str:
    model, each = plan.setting.model, experts_of(plan.setting.model)[1]
    lines = [
        f"{model.name} does not fit: {gib(model.routed_bytes)} of routed experts, whole ones of "
        f"{gib(each)} in all layers; {gib(plan.missing)} are missing"
    ]
    for number, (card, device) in enumerate(zip(plan.cards, devices, strict=True)):
        lines.append(
            f"card {number}, {device}: {gib(card.free)} free, {gib(card.dense + card.other)} for "
            f"dense parts, {gib(card.workspace)} for workspace, {gib(card.kv_reserve)} for the KV "
            f"cache, so {gib(max(card.left - card.kv_reserve, 0))} for experts"
        )
    changes = [change.replace("--rows", "max_rows") for change in plan.would_fit]
    lines.append(f"would fit: {'; or '.join(changes) or 'no change that was tried'}")
    return "\n".join(lines)
