"""What one MLP block takes from a checkpoint's files, and what is wrong with them.

Loading and auditing read the same plan, so a report lists exactly what a load takes.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from exactmoe.checkpoint.dialects import Dialect, Part
from exactmoe.checkpoint.header import TensorInfo
from exactmoe.errors import CheckpointError, Unsupported
from exactmoe.families import LayerSpec


@dataclass(frozen=True)
class Finding:
    """Something wrong with a checkpoint.

    Attributes:
        tensor: its name.
        message: names file and tensor, what was found and what was expected.
        info: None when the tensor is missing.
        unsupported: the layout is known and well formed, but not run here.
    """

    tensor: str
    message: str
    info: TensorInfo | None = None
    unsupported: bool = False


@dataclass(frozen=True)
class Stored:
    """What one projection of one expert takes of a tensor in the files.

    Attributes:
        info: the tensor.
        index: expert, and rows or column, of a stacked tensor; (): all of it.
    """

    info: TensorInfo
    index: tuple[int | slice, ...] = ()

    def __str__(self) -> str:
        return f"{self.info.file}: {self.info.name}{self.place}"

    @property
    def place(self) -> str:
        """The index as Python writes it, "" for the whole tensor."""
        words = [f"{i.start}:{i.stop}" if isinstance(i, slice) else str(i) for i in self.index]
        return f"[{', '.join(words)}]" if words else ""


@dataclass(frozen=True)
class Source:
    """One projection of one expert as it lies in the files: part of the dialect -> what it takes.

    `base` is its name without the last part, which belongs to the dialect.
    """

    base: str
    dialect: Dialect
    parts: dict[Part, Stored]


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
        """A stacked tensor comes once per expert."""
        return (stored.info for source in self.sources for stored in source.parts.values())


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
        """Every tensor that a load of this layer reads, once, and what it is part of."""
        seen = set()
        for weight in (*self.experts.values(), *self.dense.values()):
            for info in weight.tensors:
                if info.name not in seen:
                    seen.add(info.name)
                    yield info, weight.what
        for info in self.router.values():
            yield info, "router"

    def require_complete(self) -> None:
        """Raises the first finding: CheckpointError, or Unsupported for a layout not run here."""
        if self.errors:
            more = f" (and {len(self.errors) - 1} more)" if len(self.errors) > 1 else ""
            error = Unsupported if self.errors[0].unsupported else CheckpointError
            raise error(self.errors[0].message + more)

    def wrong(self, info: TensorInfo, message: str, unsupported: bool = False) -> None:
        """Adds a finding about a tensor that is there."""
        self.errors.append(Finding(info.name, message, info, unsupported))

    def missing(self, name: str, message: str) -> None:
        """Adds a finding about a tensor that is not there."""
        self.errors.append(Finding(name, message))

    def expect(
        self, info: TensorInfo, dtypes: tuple[str, ...], shapes: Iterable[tuple[int, ...]]
    ) -> bool:
        """Whether a tensor has one of these dtypes and shapes; adds a finding if not."""
        shapes = list(shapes)
        if info.dtype in dtypes and info.shape in shapes:
            return True
        expected = f"{' or '.join(dtypes)} {' or '.join(str(list(s)) for s in shapes)}"
        self.wrong(info, f"{info}: expected {expected}")
        return False
