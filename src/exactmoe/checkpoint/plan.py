"""Which tensors of a checkpoint make up one MLP block, decided from headers alone.

Loading and auditing read the same plan, so a report lists exactly what a load takes.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from exactmoe.checkpoint.dialects import DIALECTS, Dialect, Part, detect
from exactmoe.checkpoint.index import Checkpoint, TensorInfo
from exactmoe.errors import CheckpointError
from exactmoe.families import PROJECTIONS, LayerSpec


@dataclass(frozen=True)
class Finding:
    """Something wrong with a checkpoint.

    Attributes:
        tensor: its name.
        message: names file and tensor, what was found and what was expected.
        info: None when the tensor is missing.
    """

    tensor: str
    message: str
    info: TensorInfo | None = None


@dataclass(frozen=True)
class Source:
    """One projection of one expert as it lies in the files: part of the dialect -> tensor."""

    base: str
    dialect: Dialect
    tensors: dict[Part, TensorInfo]


@dataclass
class WeightPlan:
    """One projection of E experts (E = 1: a dense part).

    Attributes:
        what: for reports, for example "routed experts".
        rows, columns: N and K.
        sources: one per expert, in order; incomplete when `LayerPlan.errors` says so.
    """

    what: str
    rows: int
    columns: int
    sources: list[Source] = field(default_factory=list)

    @property
    def dialect(self) -> Dialect:
        return self.sources[0].dialect

    @property
    def tensors(self) -> Iterator[TensorInfo]:
        return (info for source in self.sources for info in source.tensors.values())


@dataclass
class LayerPlan:
    """Everything that one MLP block takes from the files.

    Attributes:
        spec: the layer.
        experts: "gate", "up", "down" -> routed experts; empty in a dense layer.
        dense: "gate", "up", "down" -> the dense MLP, or the shared expert of a MoE layer.
        router: "weight", "bias", "table" -> tensor, those that the layer has.
        errors: what is missing, malformed or unexpected in this block; a load raises the first.
        notes: what was accepted although published checkpoints store it otherwise.
    """

    spec: LayerSpec
    experts: dict[str, WeightPlan] = field(default_factory=dict)
    dense: dict[str, WeightPlan] = field(default_factory=dict)
    router: dict[str, TensorInfo] = field(default_factory=dict)
    errors: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def consumed(self) -> Iterator[tuple[TensorInfo, str]]:
        """Every tensor that a load of this layer reads, and what it is part of."""
        for weight in (*self.experts.values(), *self.dense.values()):
            for info in weight.tensors:
                yield info, weight.what
        for info in self.router.values():
            yield info, "router"

    def require_complete(self) -> None:
        """Raises CheckpointError for the first finding."""
        if self.errors:
            more = f" (and {len(self.errors) - 1} more)" if len(self.errors) > 1 else ""
            raise CheckpointError(self.errors[0].message + more)


def plan_layer(checkpoint: Checkpoint, layer: int) -> LayerPlan:
    """The plan of one layer; ConfigError when the model has no such layer."""
    spec = checkpoint.family.layer(layer)
    plan = LayerPlan(spec)
    inner, hidden = spec.intermediate_size, spec.hidden_size
    if spec.moe is not None:
        experts = range(spec.moe.num_experts)
        for name in PROJECTIONS:
            bases = [spec.names.expert(expert, name) for expert in experts]
            plan.experts[name] = _weight(
                checkpoint, plan, "routed experts", bases, _shape(name, inner, hidden)
            )
        _router(checkpoint, plan)
    for name in PROJECTIONS:
        if spec.shared_size is not None:
            base, size, what = spec.names.shared(name), spec.shared_size, "shared expert"
        else:
            base, size, what = spec.names.dense(name), inner, "dense MLP"
        plan.dense[name] = _weight(checkpoint, plan, what, [base], _shape(name, size, hidden))
    _unexpected(checkpoint, plan)
    return plan


def _unexpected(checkpoint: Checkpoint, plan: LayerPlan) -> None:
    """Finds what is neither consumed nor ignored: it could change what the block means."""
    seen = {info.name for info, _ in plan.consumed()} | {error.tensor for error in plan.errors}
    for name in checkpoint.names_under(f"{plan.spec.names.block}."):
        if name not in seen and checkpoint.family.ignored_by(name) is None:
            plan.errors.append(unexpected(checkpoint.tensors[name]))


def unexpected(info: TensorInfo) -> Finding:
    """The finding for a tensor that belongs to nothing."""
    return Finding(info.name, f"{info} is unexpected: no part and no ignore rule claims it", info)


def _shape(projection: str, inner: int, hidden: int) -> tuple[int, int]:
    return (hidden, inner) if projection == "down" else (inner, hidden)


def _weight(
    checkpoint: Checkpoint, plan: LayerPlan, what: str, bases: Sequence[str], shape: tuple[int, int]
) -> WeightPlan:
    weight = WeightPlan(what, *shape)
    for base in bases:
        source = _source(checkpoint, plan, base, shape)
        if source is None:
            continue
        weight.sources.append(source)
        if source.dialect is not weight.dialect:
            first = weight.sources[0]
            plan.errors += [
                Finding(
                    info.name,
                    f"{info} is {source.dialect.name}, but {first.base} is {first.dialect.name}; "
                    "allowed: one layout for all experts of a projection",
                    info,
                )
                for info in source.tensors.values()
            ]
            weight.sources.pop()
    return weight


def _source(
    checkpoint: Checkpoint, plan: LayerPlan, base: str, shape: tuple[int, int]
) -> Source | None:
    """The tensors of one projection of one expert; None, and findings, when incomplete."""
    leaves = {
        leaf: info
        for leaf, info in checkpoint.leaves(base).items()
        if checkpoint.family.ignored_by(info.name) is None
    }
    dialect = detect({leaf: info.dtype for leaf, info in leaves.items()})
    if dialect is None:
        _unknown(plan, checkpoint, base, leaves.values())
        return None
    rows, columns = shape
    tensors: dict[Part, TensorInfo] = {}
    good = True
    for part in dialect.parts:
        name = f"{base}.{part.leaf}"
        if part.leaf not in leaves:
            plan.errors.append(
                Finding(
                    name,
                    f"{checkpoint.path}: {name} is missing ({dialect.name} needs {part.dtype})",
                )
            )
            good = False
            continue
        info = tensors[part] = leaves[part.leaf]
        if part.per is not None and columns % part.per:
            message = f"{info}: k is {columns}, but {dialect.name} stores multiples of {part.per}"
            plan.errors.append(Finding(name, message, info))
            good = False
        else:
            good &= _expect(plan, info, (part.dtype,), part.shape(rows, columns))
    if good:
        return Source(base, dialect, tensors)
    # The rest of an incomplete projection is not consumed, and no rule ignores it.
    found = {finding.tensor for finding in plan.errors}
    plan.errors += [
        Finding(info.name, f"{info} belongs to an incomplete {dialect.name} projection", info)
        for info in tensors.values()
        if info.name not in found
    ]
    return None


def _unknown(
    plan: LayerPlan, checkpoint: Checkpoint, base: str, infos: Collection[TensorInfo]
) -> None:
    if not infos:
        name = f"{base}.weight"
        plan.errors.append(
            Finding(name, f"{checkpoint.path}: {name} is missing, and all of {base}")
        )
    known = "; ".join(
        f"{d.name} ({', '.join(f'{p.leaf} {p.dtype}' for p in d.parts)})" for d in DIALECTS
    )
    found = ", ".join(f"{info.name} {info.dtype}" for info in infos)
    plan.errors += [
        Finding(info.name, f"{info.file}: unknown layout of {base}: {found}; known: {known}", info)
        for info in infos
    ]


def _expect(
    plan: LayerPlan, info: TensorInfo, dtypes: tuple[str, ...], shape: tuple[int, ...]
) -> bool:
    # A scalar is () in some exports and [1] in others.
    shapes = [(), (1,)] if shape == () else [shape]
    if info.dtype in dtypes and info.shape in shapes:
        return True
    expected = f"{' or '.join(dtypes)} {' or '.join(str(list(s)) for s in shapes)}"
    plan.errors.append(Finding(info.name, f"{info}: expected {expected}", info))
    return False


def _router(checkpoint: Checkpoint, plan: LayerPlan) -> None:
    names, moe = plan.spec.names, plan.spec.moe
    if moe is None:
        return
    vocab_size = plan.spec.vocab_size or 0
    wanted = {
        "weight": (names.router_weight, ("BF16", "F32"), (moe.num_experts, moe.hidden_size)),
        "bias": (names.router_bias, ("F32", "BF16"), (moe.num_experts,)),
        "table": (names.router_table, ("I64",), (vocab_size, moe.top_k)),
    }
    for part, (name, dtypes, shape) in wanted.items():
        if name is None:
            continue
        info = checkpoint.tensors.get(name)
        if info is None:
            plan.errors.append(
                Finding(name, f"{checkpoint.path}: {name} is missing (router {part})")
            )
        elif _expect(plan, info, dtypes, shape):
            plan.router[part] = info
    bias = plan.router.get("bias")
    if bias is not None and bias.dtype != "F32":
        plan.notes.append(
            f"{bias}: upcast exactly; published selection biases are F32, so this one was rounded"
        )
