"""Commands that torchrun started: every rank works, the first one speaks for all."""

from collections.abc import Mapping, Sequence
from typing import Any

from exactmoe.proof import Report


def is_first(settings: Mapping[str, Any]) -> bool:
    """Whether this process is alone, or the first of its ranks.

    settings: of options.Running.settings.
    """
    ranks = settings.get("ranks")
    return ranks is None or ranks.rank == 0


def others_failed(settings: Mapping[str, Any], reports: Sequence[Report]) -> tuple[str, ...]:
    """What all other ranks found to differ, a line each. Every rank has to call it."""
    ranks = settings.get("ranks")
    if ranks is None:
        return ()
    mine = []
    for report in reports:
        found = [*map(str, report.differences), *report.excesses]
        if report.failed:
            found.append(f"{report.mismatches} rows differ")
        mine += [f"{report.subject}: {line}" for line in found]
    return tuple(
        f"rank {rank}: {line}"
        for rank, lines in enumerate(ranks.objects(mine))
        if rank != ranks.rank
        for line in lines
    )
