"""Vectors: results of a layer on numbers that are the same on every machine, as digests of bytes.

Two machines compare them without exchanging a weight: `exactmoe verify --against FILE`.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exactmoe.dense import DenseMLP
from exactmoe.errors import CheckpointError
from exactmoe.layer import MoELayer
from exactmoe.proof.batch import Batch, Entry, entries
from exactmoe.ranked import RankedLayer
from exactmoe.ranked_dense import RankedDense

TOKENS = 16
"""Tokens of the call that gives a vector."""

_STREAM = 1000
EQUAL, DIFFERS, ALLOWED, NOT_COMPARED = "equal", "DIFFERS", "differs, as allowed", "not compared"


@dataclass(frozen=True)
class Vector:
    """One call of one entry of a layer.

    Attributes:
        inputs: SHA-256 over the batch and every weight of the layer, in hexadecimal: tells other
            numbers from other arithmetic.
        rows: SHA-256 of the bytes of each row of y, in hexadecimal.
        dtype: of y.
        nbytes: of y.
    """

    inputs: str
    rows: tuple[str, ...]
    dtype: str
    nbytes: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "rows": list(self.rows)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Vector":
        """The vector that `to_dict` wrote; KeyError, TypeError or ValueError if it is none."""
        inputs, dtype = values["inputs"], values["dtype"]
        rows = tuple(values["rows"])
        if not all(isinstance(text, str) for text in (inputs, dtype, *rows)) or not rows:
            raise ValueError("digests are no text")
        return cls(inputs, rows, dtype, int(values["nbytes"]))


def vectors_of(layer: MoELayer | DenseMLP, subject: str, seed: int = 0) -> dict[str, Vector]:
    """ "subject, entry" -> its vector, for each entry of a layer: "block", "experts", "dense"."""
    found = {}
    for entry in entries(layer):
        batch = entry.random(TOKENS, _STREAM * (seed + 1))
        y = entry(batch)
        found[f"{subject}, {entry.name}"] = Vector(
            inputs=_inputs(entry, batch),
            rows=tuple(hashlib.sha256(_as_bytes(row)).hexdigest() for row in y),
            dtype=str(y.dtype).removeprefix("torch."),
            nbytes=y.nbytes,
        )
    return found


def _inputs(entry: Entry, batch: Batch) -> str:
    """Weights in canonical order, whatever order their card reads."""
    digest = hashlib.sha256()
    layer = entry.layer
    if isinstance(layer, RankedLayer | RankedDense):
        layer = layer.alone()
    for name, tensor in (*sorted(batch.tensors().items()), *_weights(layer)):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(_as_bytes(tensor))
    return digest.hexdigest()


def _weights(layer: MoELayer | DenseMLP) -> Iterator[tuple[str, Tensor]]:
    for number, weight in enumerate(layer.bank.weights()):
        for part in ("codes", "scales", "global_scale"):
            tensor = getattr(weight, part)
            if tensor is not None:
                yield f"{number} {weight.format} {weight.global_scale_op} {part}", tensor
    if isinstance(layer, DenseMLP):
        return
    if layer.router is not None:
        yield from sorted(layer.router.state_dict().items())
    if layer.shared is not None:
        yield from _weights(layer.shared)


def _as_bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


@dataclass(frozen=True)
class Other:
    """What another machine's `exactmoe verify --json` says.

    Attributes:
        name: of the file.
        machine: its fingerprint.
        vectors: its vectors.
    """

    name: str
    machine: Mapping[str, Any]
    vectors: Mapping[str, Vector]

    @classmethod
    def read(cls, path: str | Path) -> "Other":
        """CheckpointError: the file is missing or is no such report."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            machine = content["machine"]
            names = (machine["architecture"], machine["contract"])
            found = {name: Vector.from_dict(v) for name, v in content["vectors"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{path} is no report of `exactmoe verify --json`: {error!r}"
            ) from error
        if not found or None in names:
            raise CheckpointError(f"{path} holds no vectors; allowed: at least one")
        return cls(str(path), machine, found)


@dataclass(frozen=True)
class Compared:
    """One vector here and there.

    Attributes:
        name: "subject, entry".
        result: EQUAL, DIFFERS, ALLOWED or NOT_COMPARED.
        nbytes: that were compared.
        reason: why it was not compared, or which rows differ.
    """

    name: str
    result: str
    nbytes: int = 0
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.result}{f' ({self.reason})' if self.reason else ''}"


@dataclass(frozen=True)
class Agreement:
    """This machine beside another.

    Equal bits are promised for CPUs, and for cards of one exact architecture (docs/numerics.md):
    only there a difference is a failure.
    """

    other: Other
    machine: Mapping[str, Any]
    compared: tuple[Compared, ...]

    @classmethod
    def of(
        cls, machine: Mapping[str, Any], found: Mapping[str, Vector], other: Other
    ) -> "Agreement":
        """Compare the vectors of `machine` with those of `other`."""
        here, there = machine["contract"], other.machine["contract"]
        promised = machine["architecture"] == other.machine["architecture"]
        compared = []
        for name in dict.fromkeys((*found, *other.vectors)):
            mine, theirs = found.get(name), other.vectors.get(name)
            if mine is None or theirs is None:
                reason = "only there" if mine is None else "only here"
                compared.append(Compared(name, NOT_COMPARED, reason=reason))
            elif here != there:
                reason = f"contract version {here} here, {there} there"
                compared.append(Compared(name, NOT_COMPARED, reason=reason))
            else:
                compared.append(_compared(name, mine, theirs, promised))
        return cls(other, machine, tuple(compared))

    @property
    def ok(self) -> bool:
        """Whether something was compared and nothing differs that must not."""
        results = {one.result for one in self.compared}
        return DIFFERS not in results and bool(results & {EQUAL, ALLOWED})

    @property
    def nbytes(self) -> int:
        """Bytes compared."""
        return sum(one.nbytes for one in self.compared)

    def counts(self) -> dict[str, int]:
        """Result -> how many vectors have it."""
        results = [one.result for one in self.compared]
        return {r: results.count(r) for r in dict.fromkeys(results)}

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "file": self.other.name,
            "machine": dict(self.other.machine),
            "ok": self.ok,
            "bytes": self.nbytes,
            "compared": [asdict(one) for one in self.compared],
        }


def _compared(name: str, mine: Vector, theirs: Vector, promised: bool) -> Compared:
    if mine.inputs != theirs.inputs:
        reason = "weights or inputs differ before any layer ran: another checkpoint, or --seed"
        return Compared(name, NOT_COMPARED, reason=reason)
    if (mine.dtype, len(mine.rows)) != (theirs.dtype, len(theirs.rows)):
        shapes = f"{len(mine.rows)} rows {mine.dtype} here, {len(theirs.rows)} {theirs.dtype} there"
        return Compared(name, NOT_COMPARED, reason=shapes)
    pairs = enumerate(zip(mine.rows, theirs.rows, strict=True))
    wrong = [row for row, (a, b) in pairs if a != b]
    if not wrong:
        return Compared(name, EQUAL, mine.nbytes)
    reason = f"{len(wrong)} of {len(mine.rows)} rows, first {wrong[0]}"
    if promised:
        return Compared(name, DIFFERS, mine.nbytes, reason)
    return Compared(name, ALLOWED, mine.nbytes, f"{reason}; the architectures differ")
