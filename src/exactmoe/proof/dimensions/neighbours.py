"""Neighbours: what the other tokens of the call are, even NaN or Inf."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from exactmoe.proof.batch import Batch
from exactmoe.proof.numbers import units
from exactmoe.proof.trial import Trial


def neighbours(trial: Trial) -> None:
    """The needles first, in the middle and last among neighbours of each kind, at each width.

    Each is compared with the same needle at the same place of the same width among its own copies,
    so only the neighbours differ. The needles change places from width to width.
    """
    for kind, make in KINDS.items():
        _among(trial, kind, make, trial.finite_needles)
    _among(trial, "random neighbours of a NaN", _random, trial.nan_needles)


def _among(
    trial: Trial, kind: str, make: Callable[[Trial, int], Batch | None], needles: Sequence[int]
) -> None:
    for turn, tokens in enumerate(trial.widths):
        others = make(trial, tokens)
        if others is None or tokens == 1:
            continue
        for at in _calls(tokens, needles, turn):
            y = trial.run(others.with_rows(list(at), [trial.needles[n] for n in at.values()]))
            for place, needle in at.items():
                rows = slice(place, place + 1)
                expected = trial.copies(needle, tokens)[rows]
                trial.compare("neighbours", kind, expected, y[rows], tokens, place)


def _calls(tokens: int, needles: Sequence[int], turn: int) -> list[dict[int, int]]:
    """Place -> needle of each call; at least one neighbour is left in it."""
    places = sorted({0, tokens // 2, tokens - 1})
    if tokens > len(places):
        return [{place: needles[(turn + n) % len(needles)] for n, place in enumerate(places)}]
    return [{place: needle} for place in places for needle in needles]


def _random(trial: Trial, tokens: int) -> Batch:
    return trial.crowd.rows(slice(0, tokens))


def _to_its_experts(trial: Trial, tokens: int) -> Batch:
    """The ordinary needle's routes for all; a whole block's router gets it at other lengths."""
    batch = trial.needles[0].repeated(tokens)
    lengths = 0.5 + units((tokens, 1), trial.seed, batch.x.device)
    return replace(batch, x=(batch.x.float() * lengths).bfloat16())


def _to_other_experts(trial: Trial, tokens: int) -> Batch | None:
    batch, needle = _random(trial, tokens), trial.needles[0]
    if batch.expert_ids is None or needle.expert_ids is None:
        return None
    taken = set(needle.expert_ids[0].tolist())
    free = [e for e in range(trial.entry.num_experts) if e not in taken]
    if not free:
        return None
    choice = torch.tensor(free, device=batch.x.device)
    return replace(batch, expert_ids=choice[batch.expert_ids.long() % len(free)].int())


def _absent(trial: Trial, tokens: int) -> Batch | None:
    batch = _random(trial, tokens)
    if batch.expert_ids is None:
        return None
    return replace(batch, expert_ids=torch.full_like(batch.expert_ids, -1))


def _scaled(trial: Trial, tokens: int) -> Batch:
    return _random(trial, tokens).scaled(1e4)


def _filled(value: float) -> Callable[[Trial, int], Batch]:
    def make(trial: Trial, tokens: int) -> Batch:
        batch = _random(trial, tokens)
        return replace(batch, x=torch.full_like(batch.x, value))

    return make


KINDS: dict[str, Callable[[Trial, int], Batch | None]] = {
    "random neighbours": _random,
    "neighbours to its experts": _to_its_experts,
    "neighbours to other experts": _to_other_experts,
    "absent neighbours": _absent,
    "neighbours x 1e4": _scaled,
    "NaN neighbours": _filled(float("nan")),
    "Inf neighbours": _filled(float("inf")),
}
