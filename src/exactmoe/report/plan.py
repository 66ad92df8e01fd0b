"""The least time of a step of a model on its cards, from bytes and read rates; nothing runs."""

from dataclasses import dataclass

from exactmoe.errors import ConfigError
from exactmoe.fitting import ModelPlan, experts_of

WIDTHS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Floor:
    """The least time of the MLP layers of one step: the busiest card's reads at its read rate.

    Attributes:
        tokens: of the step.
        distinct: experts of a layer that are read, expected under uniform routing.
        card_bytes: that each card reads: its share of those experts; the first card also all dense
            parts, shared experts and routers.
        seconds: of the card that takes longest.
    """

    tokens: int
    distinct: float
    card_bytes: tuple[float, ...]
    seconds: float


def floors(
    plan: ModelPlan, rates: tuple[float, ...], widths: tuple[int, ...] = WIDTHS
) -> list[Floor]:
    """The floor of a step of each width. rates: bytes a second of each card, or one for all.

    Attention, norms and the KV cache are not in it: they are not MLP layers.

    Raises:
        ConfigError: the rates are neither one nor one a card; the model does not fit.
    """
    if plan.partition is None:
        raise ConfigError("a model that does not fit has no floor")
    num_cards, model = len(plan.cards), plan.setting.model
    each = rates * num_cards if len(rates) == 1 else rates
    if len(each) != num_cards:
        raise ConfigError(f"{len(rates)} read rates for {num_cards} cards; allowed: 1, {num_cards}")
    num_experts, _ = experts_of(model)
    top_k = next(layer.spec.moe.top_k for layer in model.layers if layer.spec.moe is not None)
    found = []
    for tokens in widths:
        share = 1 - (1 - min(top_k / num_experts, 1)) ** tokens
        read = tuple(share * card.experts + card.dense for card in plan.cards)
        seconds = max(nbytes / rate for nbytes, rate in zip(read, each, strict=True))
        found.append(Floor(tokens, share * num_experts, read, seconds))
    return found
