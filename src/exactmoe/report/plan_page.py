"""A plan as one HTML file with its picture inside, and the picture as a PNG."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from exactmoe.errors import ConfigError
from exactmoe.fitting import ARENAS, Card, ModelPlan
from exactmoe.report.drawing import figure_of, png
from exactmoe.report.html import Section, page
from exactmoe.report.plan import Floor
from exactmoe.runtime.sizes import gb, gib

_GIB = 2**30
# What a card holds, from the left, and its colour of matplotlib's tab10.
_PARTS = {
    "routed experts": "tab:blue",
    "dense parts and routers": "tab:cyan",
    "attention, embeddings, norms": "tab:purple",
    "workspace": "tab:orange",
    "kept for the KV cache": "tab:green",
    "left": "#d9d9d9",
    "room for routed experts": "#c6dbef",
}


def write(path: str | Path, plan: ModelPlan, floors: Sequence[Floor], counted: bool) -> list[str]:
    """Write the page, and its picture beside it as NAME-memory.png; returns the files.

    counted: whether attention, embeddings and norms are.

    Raises:
        Unsupported: matplotlib is not installed.
        ConfigError: a file cannot be written.
    """
    target, image = Path(path), memory(plan)
    picture = target.with_name(f"{target.stem}-memory.png")
    sections = list(_sections(plan, floors, image, counted))
    try:
        target.write_text(page(f"Where {plan.setting.model.name} fits", sections), encoding="utf-8")
        picture.write_bytes(image)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error
    return [str(target), str(picture)]


def memory(plan: ModelPlan) -> bytes:
    """A bar for each card: what lies on it, and what it has.

    Raises:
        Unsupported: matplotlib is not installed.
    """
    held = {_name(plan, number): _parts(card) for number, card in enumerate(plan.cards)}
    if plan.partition is None:
        # What would be left is room for experts, and they stand below, beside it.
        held = {name: _renamed(parts) for name, parts in held.items()}
        held["needed"] = {"routed experts": plan.setting.model.routed_bytes}
    figure = figure_of(1.9 + 0.7 * len(held))
    panel = figure.subplots()
    places, begin = np.arange(len(held)), np.zeros(len(held))
    ends = [sum(parts.values()) for parts in held.values()]
    widest = 1.05 * max(*ends, *(card.free for card in plan.cards)) / _GIB
    for name, color in _PARTS.items():
        sizes = np.array([parts.get(name, 0) / _GIB for parts in held.values()])
        if sizes.any():
            panel.barh(places, sizes, 0.65, begin, color=color, label=name, edgecolor="white")
            for place, (at, size) in enumerate(zip(begin, sizes, strict=True)):
                if size > 0.03 * widest:
                    told = f"{size:.1f}" if size >= 1 else f"{size:.2f}"
                    panel.text(at + size / 2, place, told, ha="center", va="center")
        begin += sizes
    for place, card in enumerate(plan.cards):
        end = [card.free / _GIB] * 2
        panel.plot(end, [place - 0.42, place + 0.42], color="black", linewidth=2)
    panel.plot([], [], color="black", linewidth=2, label="free memory of the card")
    panel.set_yticks(places, list(held))
    panel.invert_yaxis()
    panel.set_xlim(0, widest)
    panel.set_xlabel("GiB")
    panel.grid(axis="x", alpha=0.25)
    verdict = "fits" if plan.partition is not None else f"does not fit: {gib(plan.missing)} missing"
    figure.suptitle(f"Memory of each card: {verdict}")
    figure.legend(loc="outside lower center", ncols=4)
    return png(figure)


def _parts(card: Card) -> dict[str, int]:
    """Bytes by the names of _PARTS; together the card's free bytes, or more where it is over."""
    return {
        "routed experts": card.experts,
        "dense parts and routers": card.dense,
        "attention, embeddings, norms": card.other,
        "workspace": card.workspace,
        "kept for the KV cache": card.kv_reserve,
        "left": max(0, card.left - card.kv_reserve),
    }


def _renamed(parts: dict[str, int]) -> dict[str, int]:
    return {("room for routed experts" if n == "left" else n): size for n, size in parts.items()}


def _name(plan: ModelPlan, card: int) -> str:
    if plan.partition is None:
        return f"card {card}"
    owned = plan.partition.experts[card]
    return f"card {card}\nexperts {owned[0]} to {owned[-1]}"


def _sections(
    plan: ModelPlan, floors: Sequence[Floor], image: bytes, counted: bool
) -> Iterator[Section]:
    model = plan.setting.model
    fits = plan.partition is not None
    text = [
        f"{model.model_type}, from {model.source}: routed experts {gb(model.routed_bytes)} "
        f"({model.format}), dense MLPs, shared experts and routers {gb(model.mlp_bytes)}.",
        "It fits." if fits else f"It does not fit: {gib(plan.missing)} are missing.",
    ]
    if not counted:
        text.append("Not counted: attention, embeddings and norms, which a config does not size.")
    yield Section("Answer", text=text)
    if plan.would_fit:
        rows = [(change,) for change in plan.would_fit]
        yield Section("What would fit", head=("one of these is enough",), rows=rows)
    yield Section(
        "What lies on each card",
        text=[
            "Routed experts are cut whole, the same cut in every layer; everything else lies on "
            f"card 0. The workspace is {ARENAS} times that of a call of {plan.setting.rows} "
            "tokens: for calls, and for captured graphs. What is left may hold more KV cache."
        ],
        picture=image,
        caption="Bytes of each card, in GiB.",
        head=("card", "free", *_parts(plan.cards[0])),
        rows=[
            (str(number), *map(_size, (card.free, *_parts(card).values())))
            for number, card in enumerate(plan.cards)
        ],
    )
    if floors:
        yield Section(
            "Floor of a decode step",
            text=[
                "The least time of the MLP layers: the reads of the busiest card at the given "
                "rate. Attention and the KV cache are not in it."
            ],
            head=("tokens a step", "distinct experts a layer", "read by each card", "ms"),
            rows=[_floor_row(step) for step in floors],
        )


def _size(nbytes: int) -> str:
    """In one line."""
    return gib(nbytes).replace(" ", "\N{NO-BREAK SPACE}")


def _floor_row(step: Floor) -> tuple[Any, ...]:
    read = ", ".join(map(gb, step.card_bytes))
    return step.tokens, round(step.distinct, 1), read, round(1e3 * step.seconds, 3)
