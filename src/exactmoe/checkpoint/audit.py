"""The load report: every tensor is consumed, ignored by a named rule, or an error."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from exactmoe.checkpoint.header import TensorInfo
from exactmoe.checkpoint.index import Checkpoint
from exactmoe.checkpoint.plan import Finding, LayerPlan
from exactmoe.checkpoint.planner import plan_layer, unexpected
from exactmoe.errors import CheckpointError, Unsupported
from exactmoe.families import IgnoreRule

SHOWN_ERRORS = 20
SHOWN_NOTES = 3


@dataclass(frozen=True)
class Consumed:
    """A tensor that the load of a layer reads, and what it is part of ("router", for example)."""

    info: TensorInfo
    layer: int
    what: str


@dataclass(frozen=True)
class Ignored:
    """A tensor that a rule of the family covers."""

    info: TensorInfo
    rule: IgnoreRule


@dataclass(frozen=True)
class LoadReport:
    """Where every tensor of a checkpoint goes.

    Attributes:
        path: the folder.
        model_type: of config.json.
        num_tensors, nbytes: of the whole checkpoint.
        consumed, ignored, errors: together every tensor, each once; errors also name missing ones.
        formats: layer -> what is stored how, for example {"routed experts": "ModelOpt NVFP4"}.
        notes: what was accepted although published checkpoints store it otherwise.
    """

    path: str
    model_type: str
    num_tensors: int
    nbytes: int
    consumed: tuple[Consumed, ...]
    ignored: tuple[Ignored, ...]
    errors: tuple[Finding, ...]
    formats: dict[int, dict[str, str]]
    notes: tuple[str, ...]

    def require_clean(self) -> None:
        """Raises an error that lists the errors: Unsupported where all of them are layouts that
        are not run here, else CheckpointError.
        """
        if self.errors:
            lines = _first([finding.message for finding in self.errors], SHOWN_ERRORS)
            known = all(finding.unsupported for finding in self.errors)
            error = Unsupported if known else CheckpointError
            raise error("\n".join([f"{self.path}: {len(self.errors)} errors", *lines]))

    def to_dict(self) -> dict[str, Any]:
        """For JSON: totals, bytes and tensors per part and per rule, and every error."""
        missing = [finding for finding in self.errors if finding.info is None]
        present = [finding.info for finding in self.errors if finding.info is not None]
        return {
            "path": self.path,
            "model_type": self.model_type,
            "total": {"tensors": self.num_tensors, "bytes": self.nbytes},
            "consumed": _totals((c.what, c.info) for c in self.consumed),
            "ignored": {
                name: {**total, "reason": self._reason(name)}
                for name, total in _totals((i.rule.name, i.info) for i in self.ignored).items()
            },
            "errors": {
                "tensors": len(present),
                "bytes": sum(info.nbytes for info in present),
                "missing": len(missing),
                "messages": [finding.message for finding in self.errors],
            },
            "formats": {str(layer): dict(parts) for layer, parts in self.formats.items()},
            "notes": list(self.notes),
        }

    def _reason(self, name: str) -> str:
        return next(i.rule.reason for i in self.ignored if i.rule.name == name)

    def text(self) -> str:
        """The report for people."""
        content = self.to_dict()
        total = content["total"]
        lines = [
            f"{self.path}: {self.model_type}, {total['tensors']} tensors, {total['bytes']} bytes"
        ]
        for what, entry in content["consumed"].items():
            kinds = sorted({parts[what] for parts in self.formats.values() if what in parts})
            stored = f"  {', '.join(kinds)}" if kinds else ""
            lines.append(_line("consumed", what, entry) + stored)
        for name, entry in content["ignored"].items():
            lines.append(_line("ignored", name, entry) + f"  {entry['reason']}")
        errors = content["errors"]
        lines.append(_line("errors", f"{errors['missing']} missing", errors))
        lines += _first(errors["messages"], SHOWN_ERRORS)
        if self.notes:
            lines += ["notes", *_first(self.notes, SHOWN_NOTES)]
        return "\n".join(lines)


def _first(messages: Sequence[str], count: int) -> list[str]:
    more = [f"and {len(messages) - count} more"] if len(messages) > count else []
    return [f"  {message}" for message in [*messages[:count], *more]]


def _line(list_name: str, what: str, entry: dict[str, Any]) -> str:
    return f"  {list_name:<9} {what:<17} {entry['tensors']:>7} tensors {entry['bytes']:>15} bytes"


def _totals(items: Iterable[tuple[str, TensorInfo]]) -> dict[str, dict[str, Any]]:
    tensors: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for name, info in items:
        tensors[name] += 1
        nbytes[name] += info.nbytes
    return {name: {"tensors": tensors[name], "bytes": nbytes[name]} for name in tensors}


def audit(checkpoint: Checkpoint) -> LoadReport:
    """Plans every layer from the headers and accounts for every tensor.

    No value is read, and what is wrong with the checkpoint is in the report, not raised.
    """
    plans = [plan_layer(checkpoint, layer) for layer in range(checkpoint.family.num_layers)]
    consumed = [
        Consumed(info, plan.spec.layer, what) for plan in plans for info, what in plan.consumed()
    ]
    errors = [finding for plan in plans for finding in plan.errors]
    seen = {entry.info.name for entry in consumed} | {finding.tensor for finding in errors}
    ignored = []
    for name, info in checkpoint.tensors.items():
        if name in seen:
            continue
        rule = checkpoint.family.ignored_by(name)
        if rule is None:
            errors.append(unexpected(info))
        else:
            ignored.append(Ignored(info, rule))
    return LoadReport(
        path=str(checkpoint.path),
        model_type=checkpoint.family.model_type,
        num_tensors=len(checkpoint.tensors),
        nbytes=checkpoint.nbytes,
        consumed=tuple(consumed),
        ignored=tuple(ignored),
        errors=tuple(errors),
        formats={plan.spec.layer: _formats(plan) for plan in plans},
        notes=tuple(note for plan in plans for note in plan.notes),
    )


def _formats(plan: LayerPlan) -> dict[str, str]:
    formats: dict[str, list[str]] = {}
    for weight in (*plan.experts.values(), *plan.dense.values()):
        if weight.sources and weight.dialect.name not in formats.setdefault(weight.what, []):
            formats[weight.what].append(weight.dialect.name)
    return {what: ", ".join(names) for what, names in formats.items()}
