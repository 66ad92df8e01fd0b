"""The report of a trace: a folder with one HTML file, its pictures, and a placement."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from exactmoe.bank.partition import Partition
from exactmoe.errors import ConfigError
from exactmoe.report import route_load as load
from exactmoe.report import route_pictures as pictures
from exactmoe.report.html import Section, page
from exactmoe.report.route_trace import RouteTrace

# Calls of decode, of speculative verify, and of a short prompt.
SHARE_WIDTHS = (1, 4, 16)
# Each half has one call of the widest kind.
LEAST_TOKENS = 2 * max(SHARE_WIDTHS)


@dataclass(frozen=True)
class Findings:
    """What a trace says.

    Attributes:
        tokens: of the layer that has most.
        counted: what was counted in each layer.
        union: width -> distinct experts, mean over layers.
        uniform: the same under uniform routing.
        shares: of the busiest card, one entry a placement.
        placement: made from all tokens.
    """

    tokens: int
    counted: dict[int, load.Counted]
    union: dict[int, float]
    uniform: dict[int, float]
    shares: list[load.Shares]
    placement: dict[int, Partition]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "tokens": self.tokens,
            "layers": self.layers(),
            "union": {width: round(value, 3) for width, value in self.union.items()},
            "uniform_union": {width: round(value, 3) for width, value in self.uniform.items()},
            "busiest_card_share": {part.name: part.by_width for part in self.shares},
        }

    def layers(self) -> list[dict[str, Any]]:
        """Facts of each layer, plain values."""
        found = []
        for index, one in self.counted.items():
            relative = one.relative_load
            busiest = int(relative.argmax())
            found.append(
                {
                    "layer": index,
                    "routing": "hash" if one.is_hashed else "score",
                    "experts": one.num_experts,
                    "top_k": one.top_k,
                    "tokens": one.tokens,
                    "lost": one.lost,
                    "busiest": busiest,
                    "busiest_load": round(float(relative[busiest]), 3),
                    "never": int((relative == 0).sum()),
                }
            )
        return found


def examine(
    trace: RouteTrace, num_cards: int, given: dict[str, dict[int, Partition]] | None = None
) -> Findings:
    """Load, union and card shares of a trace.

    Placements are measured on the second half of the tokens; the one that is made from route loads
    is made from the first half there, so that it is not measured on what it was made from.

    Args:
        given: name -> a placement to measure beside the even one.

    Raises:
        ConfigError: too few tokens, or a placement that does not fit the trace.
    """
    fewest = min((len(routes.steps) for routes in trace.layers.values()), default=0)
    experts = {layer: routes.num_experts for layer, routes in trace.layers.items()}
    require_examinable(fewest, experts, num_cards, given or {})
    made_from, measured_on = load.halves(trace)
    compared = {
        "even": load.even(trace, num_cards),
        **(given or {}),
        "by route load": load.placed(made_from, num_cards),
    }
    found = load.counted(trace)
    return Findings(
        tokens=max(one.tokens for one in found.values()),
        counted=found,
        union=_means([one.unions for one in found.values()]),
        uniform=_means([one.uniform_unions for one in found.values()]),
        shares=[
            load.shares(name, placement, measured_on, SHARE_WIDTHS)
            for name, placement in compared.items()
        ],
        placement=load.placed(trace, num_cards),
    )


def require_examinable(
    tokens: int,
    experts: Mapping[int, int],
    num_cards: int,
    given: Mapping[str, Mapping[int, Partition]],
) -> None:
    """What `examine` needs, known before a text runs.

    Args:
        tokens: of the layer that has least.
        experts: layer -> experts.

    Raises:
        ConfigError: too few tokens, more cards than experts, or a placement of another model or
            of other cards.
    """
    if tokens < LEAST_TOKENS:
        raise ConfigError(f"the trace has {tokens} tokens in a layer; allowed: from {LEAST_TOKENS}")
    if num_cards > min(experts.values()):
        raise ConfigError(
            f"{num_cards} cards for {min(experts.values())} experts; allowed: at most as many"
        )
    for name, placement in given.items():
        cards = {partition.num_cards for partition in placement.values()}
        if cards != {num_cards}:
            raise ConfigError(f"placement {name} is for {sorted(cards)} cards, not {num_cards}")
        of = {layer: len(partition.owners) for layer, partition in placement.items()}
        if any(of.get(layer) != count for layer, count in experts.items()):
            raise ConfigError(
                f"placement {name} has (layer: experts) {of}; the model has {dict(experts)}"
            )


def _means(of_layers: list[list[float]]) -> dict[int, float]:
    """Width -> mean over the layers."""
    return dict(zip(load.WIDTHS, np.mean(of_layers, axis=0).tolist(), strict=True))


def write(folder: Path, name: str, found: Findings, num_cards: int) -> list[str]:
    """Write routes.html, load.png, union.png, cards.png and placement.json; returns their paths.

    Raises:
        Unsupported: matplotlib is not installed.
    """
    images = {
        "load.png": pictures.load_map(found.counted),
        "union.png": pictures.union_curves(found.counted),
        "cards.png": pictures.share_bars(found.shares, num_cards),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for file, data in images.items():
        (folder / file).write_bytes(data)
    sections = _sections(found, images, num_cards)
    (folder / "routes.html").write_text(page(f"Routes of {name}", sections), encoding="utf-8")
    load.write_placement(folder / "placement.json", found.placement)
    return [str(folder / file) for file in ("routes.html", *images, "placement.json")]


def _sections(found: Findings, images: dict[str, bytes], num_cards: int) -> Sequence[Section]:
    eight = f"{found.union[8]:.1f} experts, under uniform routing {found.uniform[8]:.1f}"
    return [
        Section(
            "Load of the experts",
            text=[
                "Each row is a layer, each cell an expert. White is the load that every expert "
                "would have if all were chosen equally often; red experts serve more, blue ones "
                "fewer tokens. Hash layers choose by the token's number, not by its meaning.",
            ],
            picture=images["load.png"],
            caption="Load of each expert in each layer, relative to uniform routing.",
            head=("layer", "routing", "experts", "a token", "busiest expert", "load", "never used"),
            rows=[
                (
                    str(row["layer"]), row["routing"], row["experts"], row["top_k"],
                    str(row["busiest"]), row["busiest_load"], row["never"],
                )
                for row in found.layers()
            ],
        ),
        Section(
            "Experts that consecutive tokens share",
            text=[
                "A call reads every expert that one of its tokens chose, once. The lower the "
                f"curve, the less a call of several tokens reads: 8 tokens read {eight}.",
            ],
            picture=images["union.png"],
            caption="Distinct experts of 1 to 16 consecutive tokens, beside uniform routing.",
        ),
        Section(
            f"Placements on {num_cards} cards",
            text=[
                "A step ends when its busiest card ends. Shown is the share of a call's "
                "(token, expert) slots on that card: the lower, the better. Measured on the "
                "second half of the tokens; 'by route load' is made from the first half here. "
                "placement.json is made from all tokens.",
            ],
            picture=images["cards.png"],
            caption="Share of the busiest card for each placement and width of a call.",
        ),
    ]  # fmt: skip
