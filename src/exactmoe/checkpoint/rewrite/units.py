"""What is rewritten and what is only copied: planned from the headers, before any value is read."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from exactmoe.checkpoint.dialects import Dialect
from exactmoe.checkpoint.header import TensorInfo
from exactmoe.checkpoint.index import Checkpoint
from exactmoe.checkpoint.plan import LayerPlan, Source, WeightPlan
from exactmoe.checkpoint.planner import plan_layer
from exactmoe.checkpoint.rewrite.files import Entry, entries_of
from exactmoe.errors import Unsupported
from exactmoe.families import PROJECTIONS, LayerSpec

WHAT = ("routed", "routed+shared", "all")
# Last words of the names of static activation scales.
INPUT_SCALES = ("input_scale", "input_global_scale")


@dataclass(frozen=True)
class Projection:
    """One projection of one expert, or of a dense part.

    Attributes:
        what: "routed experts", "shared expert", "dense MLP" or "other".
        base: its name in the output, without the last part.
        source: where it lies.
        rows, columns: N and K.
        extra: entries beside the dialect's that are written for it.
        input_scale: its static activation scale, where one is converted.
    """

    what: str
    base: str
    source: Source
    rows: int
    columns: int
    extra: tuple[Entry, ...] = ()
    input_scale: TensorInfo | None = None

    @property
    def file(self) -> str:
        """The shard of its codes, which takes all of its tensors."""
        return self.source.parts[self.source.dialect.parts[0]].info.file


@dataclass(frozen=True)
class Unit:
    """Projections that are rewritten together: gate and up share a global scale, as engines that
    join the two keep one (vLLM's w13_weight_scale_2[:, 0]).

    Attributes:
        target: the dialect of the output.
    """

    target: Dialect
    projections: tuple[Projection, ...]

    def entries(self, file: str) -> list[Entry]:
        """What this unit writes into a shard."""
        made = []
        for p in self.projections:
            if p.file == file:
                made += [*entries_of(p.base, self.target, p.rows, p.columns), *p.extra]
        return made


@dataclass(frozen=True)
class Rewriting:
    """A whole job: units, and the tensors that they replace. All others are copied.

    Attributes:
        units: in the order of the layers.
        replaced: names of tensors that the output does not have, or has otherwise.
        notes: what the user should know.
    """

    units: tuple[Unit, ...]
    replaced: frozenset[str]
    notes: tuple[str, ...] = ()


def complete_plans(checkpoint: Checkpoint, notes: list[str]) -> list[LayerPlan]:
    """Plans of all layers; CheckpointError for a broken one. A multi-token prediction layer that is
    incomplete is left as it is, with a note.
    """
    family, plans = checkpoint.family, []
    for layer in range(family.num_layers + len(family.mtp_layers)):
        plan = plan_layer(checkpoint, layer)
        if plan.spec.is_mtp and plan.errors:
            notes.append(f"layer {layer} (multi-token prediction) is copied as it is")
            continue
        plan.require_complete()
        plans.append(plan)
    return plans


def chosen_weights(plan: LayerPlan, what: str) -> Iterable[tuple[dict[str, WeightPlan], bool]]:
    """The weights of a layer that --what asks for; True where they are routed experts."""
    if plan.experts:
        yield plan.experts, True
    if plan.dense and (what == "all" or (what == "routed+shared" and plan.spec.moe is not None)):
        yield plan.dense, False


def output_base(spec: LayerSpec, projection: str, expert: int | None) -> str:
    """Name of a projection in the output, where every expert has its own tensors."""
    if expert is not None:
        return spec.names.expert(expert, projection)
    return spec.names.dense(projection) if spec.moe is None else spec.names.shared(projection)


Wanted = Callable[[Dialect, Source], Dialect | None]


def layer_units(
    checkpoint: Checkpoint, plan: LayerPlan, what: str, wanted: Wanted
) -> Iterable[Unit]:
    """The units of a layer.

    Args:
        checkpoint: the folder.
        plan: of the layer.
        what: one of WHAT.
        wanted: (dialect, source) -> target, or None to leave the projection as it is.
    """
    for weights, routed in chosen_weights(plan, what):
        count = len(weights["gate"].sources)
        for expert in range(count):
            for names in (PROJECTIONS[:2], PROJECTIONS[2:]):
                by_target: dict[str, list[Projection]] = defaultdict(list)
                targets: dict[str, Dialect] = {}
                for name in names:
                    weight = weights[name]
                    source = weight.sources[expert]
                    target = wanted(source.dialect, source)
                    if target is None:
                        continue
                    targets[target.name] = target
                    base = output_base(plan.spec, name, expert if routed else None)
                    by_target[target.name].append(
                        Projection(weight.what, base, source, weight.rows, weight.columns)
                    )
                for key, projections in by_target.items():
                    yield Unit(targets[key], tuple(projections))


def replaced_names(checkpoint: Checkpoint, units: Iterable[Unit]) -> frozenset[str]:
    """Tensors that the units consume, and the static activation scales beside them."""
    names: set[str] = set()
    for unit in units:
        for projection in unit.projections:
            names |= {stored.info.name for stored in projection.source.parts.values()}
            names |= {info.name for info in input_scales(checkpoint, projection.source).values()}
    return frozenset(names)


def input_scales(checkpoint: Checkpoint, source: Source) -> Mapping[str, TensorInfo]:
    """Last word -> static activation scale of a projection."""
    found = {w: i for w, i in checkpoint.leaves(source.base).items() if w in INPUT_SCALES}
    experts, _, word = source.base.rpartition(".")
    stacked = {
        f"{word}_{w}": info
        for w in INPUT_SCALES
        if (info := checkpoint.leaves(experts).get(f"{word}_{w}")) is not None
    }
    return found | stacked


def require_whole_stacks(checkpoint: Checkpoint, units: Iterable[Unit]) -> None:
    """A stacked tensor is replaced as a whole, so all that lies in it must be rewritten."""
    taken: dict[str, int] = defaultdict(int)
    infos: dict[str, TensorInfo] = {}
    for unit in units:
        for projection in unit.projections:
            source = projection.source
            stored = source.parts[source.dialect.parts[0]]
            if stored.index:
                infos[stored.info.name] = stored.info
                taken[stored.info.name] += projection.rows
    for name, rows in taken.items():
        shape = infos[name].shape
        if rows != shape[0] * shape[1]:
            raise Unsupported(f"{infos[name]} is rewritten in part; allowed: all of it")
