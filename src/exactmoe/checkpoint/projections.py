"""Finding the tensors of a projection: one set per expert, or one stacked set for all experts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from exactmoe.checkpoint.dialects import (
    DIALECTS,
    STACKED_DIALECTS,
    Dialect,
    Part,
    detect,
    refused,
)
from exactmoe.checkpoint.header import TensorInfo
from exactmoe.checkpoint.index import Checkpoint
from exactmoe.checkpoint.plan import LayerPlan, Source, Stored, WeightPlan
from exactmoe.families import STACKED_PROJECTIONS

Found = Mapping[str, TensorInfo]


@dataclass(frozen=True)
class _Size:
    """N and K of a projection; of how many experts and projections, where they are stacked."""

    rows: int
    columns: int
    stack: tuple[int, int] | None = None

    def shapes(self, part: Part) -> list[tuple[int, ...]]:
        shape = part.shape(self.rows, self.columns)
        if self.stack is None:
            # A scalar is () in some exports and [1] in others.
            return [shape] if shape else [(), (1,)]
        experts, projections = self.stack
        return [(experts, *shape)] if shape else [(experts, projections), (experts,)]


def size(projection: str, inner: int, hidden: int) -> tuple[int, int]:
    """N and K of "gate", "up" or "down"."""
    return (hidden, inner) if projection == "down" else (inner, hidden)


def weight_plan(
    checkpoint: Checkpoint, plan: LayerPlan, what: str, bases: Sequence[str], shape: tuple[int, int]
) -> WeightPlan:
    """One projection with a set of tensors per expert; `bases` are their names."""
    weight = WeightPlan(what, *shape)
    for base in bases:
        found = _found(checkpoint, plan, base)
        parts = _parts(checkpoint, plan, base, found, _Size(*shape))
        if parts is None:
            continue
        dialect, infos = parts
        if weight.sources and dialect is not weight.dialect:
            first = weight.sources[0]
            for info in infos.values():
                plan.wrong(
                    info,
                    f"{info} is {dialect.name}, but {first.base} is {first.dialect.name}; "
                    "allowed: one layout for all experts of a projection",
                )
            continue
        stored = {part: Stored(info) for part, info in infos.items()}
        weight.sources.append(Source(base, dialect, stored))
    return weight


def expert_plans(checkpoint: Checkpoint, plan: LayerPlan, num_experts: int) -> None:
    """Plans gate, up and down of the routed experts; stacked tensors count where there is no other
    tensor of their projections.
    """
    spec = plan.spec
    for word, projections in STACKED_PROJECTIONS.items():
        bases = {
            projection: [spec.names.expert(expert, projection) for expert in range(num_experts)]
            for projection in projections
        }
        stacked = _stacked(checkpoint, plan, word)
        if stacked and not any(
            checkpoint.leaves(base) for names in bases.values() for base in names
        ):
            _plan_stacked(checkpoint, plan, word, stacked, num_experts)
            continue
        for projection in projections:
            shape = size(projection, spec.intermediate_size, spec.hidden_size)
            plan.experts[projection] = weight_plan(
                checkpoint, plan, "routed experts", bases[projection], shape
            )


def _plan_stacked(
    checkpoint: Checkpoint, plan: LayerPlan, word: str, found: Found, num_experts: int
) -> None:
    projections = STACKED_PROJECTIONS[word]
    rows, columns = size(projections[0], plan.spec.intermediate_size, plan.spec.hidden_size)
    count = len(projections)
    base = plan.spec.names.stacked(word)
    parts = _parts(
        checkpoint, plan, base, found, _Size(rows * count, columns, (num_experts, count))
    )
    for number, projection in enumerate(projections):
        weight = plan.experts[projection] = WeightPlan("routed experts", rows, columns)
        if parts is None:
            continue
        dialect, infos = parts
        for expert in range(num_experts):
            stored = {
                part: Stored(info, _index(part, info, expert, number, rows))
                for part, info in infos.items()
            }
            weight.sources.append(Source(base, dialect, stored))


def _index(
    part: Part, info: TensorInfo, expert: int, projection: int, rows: int
) -> tuple[int | slice, ...]:
    if part.per is not None:
        return expert, slice(projection * rows, (projection + 1) * rows)
    return (expert,) if len(info.shape) == 1 else (expert, projection)


def _stacked(checkpoint: Checkpoint, plan: LayerPlan, word: str) -> Found:
    """Suffix -> tensor of a stacked projection."""
    return {
        leaf.removeprefix(word): info
        for leaf, info in checkpoint.leaves(plan.spec.names.experts).items()
        if leaf.startswith(word) and checkpoint.family.ignored_by(info.name, plan.spec) is None
    }


def _found(checkpoint: Checkpoint, plan: LayerPlan, base: str) -> Found:
    """Suffix -> tensor of a projection that has its own."""
    return {
        f".{leaf}": info
        for leaf, info in checkpoint.leaves(base).items()
        if checkpoint.family.ignored_by(info.name, plan.spec) is None
    }


def _parts(
    checkpoint: Checkpoint, plan: LayerPlan, base: str, found: Found, size: _Size
) -> tuple[Dialect, dict[Part, TensorInfo]] | None:
    """The dialect of a projection and its tensors; None, and findings, when it cannot be loaded."""
    dialects = DIALECTS if size.stack is None else STACKED_DIALECTS
    fits = detect({suffix: info.dtype for suffix, info in found.items()}, dialects)
    if len(fits) != 1:
        if not _missing_in_all(checkpoint, plan, base, found, fits):
            _unknown(checkpoint, plan, base, found, dialects)
        return None
    (dialect,) = fits
    infos: dict[Part, TensorInfo] = {}
    good = True
    for part in dialect.parts:
        if part.suffix not in found:
            name, dtypes = base + part.suffix, " or ".join(part.dtypes)
            needs = f"{name} is missing ({dialect.name} needs {dtypes})"
            plan.missing(name, f"{checkpoint.path}: {needs}")
            good = False
            continue
        info = infos[part] = found[part.suffix]
        if not part.divides(size.columns):
            k = f"k is {size.columns}, but {dialect.name} stores multiples of {part.per}"
            plan.wrong(info, f"{info}: {k}")
            good = False
        else:
            good &= plan.expect(info, part.dtypes, size.shapes(part))
    if good:
        return dialect, infos
    # The rest of an incomplete projection is not consumed, and no rule ignores it.
    named = {finding.tensor for finding in plan.errors}
    for info in infos.values():
        if info.name not in named:
            plan.wrong(info, f"{info} belongs to an incomplete {dialect.name} projection")
    return None


def _missing_in_all(
    checkpoint: Checkpoint, plan: LayerPlan, base: str, found: Found, fits: Sequence[Dialect]
) -> bool:
    """Names the tensors that all dialects in question miss; False where there are none."""
    names = " or ".join(dialect.name for dialect in fits)
    suffixes = [{part.suffix for part in dialect.parts} - set(found) for dialect in fits]
    missing = set.intersection(*suffixes) if suffixes else set()
    for suffix in sorted(missing):
        plan.missing(base + suffix, f"{checkpoint.path}: {base + suffix} is missing ({names})")
    for info in found.values() if missing else ():
        plan.wrong(info, f"{info} belongs to an incomplete projection ({names})")
    return bool(missing)


def _unknown(
    checkpoint: Checkpoint, plan: LayerPlan, base: str, found: Found, dialects: Sequence[Dialect]
) -> None:
    if not found:
        name = f"{base}.weight"
        plan.missing(name, f"{checkpoint.path}: {name} is missing, and all of {base}")
        return
    word = base.rpartition(".")[2] if dialects is STACKED_DIALECTS else ""
    known = "; ".join(dialect.describe(word) for dialect in dialects)
    seen = ", ".join(f"{info.name} {info.dtype} {list(info.shape)}" for info in found.values())
    layout = refused(found)
    for info in found.values():
        if layout is not None:
            plan.wrong(info, f"{info} is {layout.name}, not run: {layout.reason}", True)
        else:
            plan.wrong(info, f"{info.file}: unknown layout of {base}: {seen}; known: {known}")
