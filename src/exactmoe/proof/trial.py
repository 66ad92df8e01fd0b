"""Trial: one entry of a layer under proof, which the dimensions call and compare."""

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from exactmoe.errors import BitMismatch
from exactmoe.proof.batch import Batch, Entry
from exactmoe.proof.report import Report

_STREAMS_A_TRIAL = 10_000
_CROWD_STREAM = 10


@dataclass(eq=False)
class Trial:
    """What a dimension works with.

    Attributes:
        entry: the call under proof.
        report: takes the counts.
        widths: tokens a call, ascending.
        seed: chooses the inputs.
        repeats: calls of the dimension "repeats".
        backend_rows: tokens of the dimension "backend"; the reference is slow.
    """

    entry: Entry
    report: Report
    widths: tuple[int, ...]
    seed: int
    repeats: int
    backend_rows: int
    _copies: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def stream(self, number: int) -> int:
        """The stream of proof/numbers.py that this trial uses under a number."""
        return self.seed * _STREAMS_A_TRIAL + number * 10

    def random(self, width: int, stream: int) -> Batch:
        """Random tokens; another stream gives other tokens."""
        return self.entry.random(width, self.stream(stream))

    def cannot_run(self, dimension: str, reason: str) -> None:
        """Say in the report why a dimension, or a part of one, does not run here."""
        self.report.not_run[dimension] = reason

    def measure(self, name: str, found: float, allowed: float) -> None:
        """An error against float64, named with the entry."""
        self.report.measure(f"{self.entry.name}: {name}", found, allowed)

    def empty(self, width: int) -> Tensor:
        """Memory for y of a call, not written."""
        layer = self.entry.layer
        dtype = torch.bfloat16 if layer.numerics.output == "bf16" else torch.float32
        return torch.empty(width, self.entry.hidden_size, dtype=dtype, device=layer.device)

    def run(self, batch: Batch, out: Tensor | None = None) -> Tensor:
        """y of one call. Its inputs must keep their bytes: counted as dimension "inputs"."""
        before = batch.map(torch.clone).tensors()
        y = self.entry(batch, out)
        wanted = self.empty(0)
        if y.shape != (batch.width, self.entry.hidden_size) or y.dtype != wanted.dtype:
            found, allowed = (batch.width, self.entry.hidden_size), wanted.dtype
            raise BitMismatch(f"y is {y.dtype} {tuple(y.shape)}; allowed: {allowed} {found}")
        for name, tensor in batch.tensors().items():
            case = f"{self.entry.name}: {name} after the call"
            was, now = (t if t.ndim > 1 else t[:, None] for t in (before[name], tensor))
            self.report.compare("inputs", case, was, now)
        return y

    def compare(
        self,
        dimension: str,
        case: str,
        expected: Tensor,
        found: Tensor,
        width: int | None = None,
        first_token: int = 0,
    ) -> None:
        """See Report.compare; the case is named with the entry."""
        case = f"{self.entry.name}: {case}" if case else self.entry.name
        self.report.compare(dimension, case, expected, found, width, first_token)

    @cached_property
    def needles(self) -> tuple[Batch, ...]:
        """The tokens that are looked for, one a batch: ordinary, large, and with a NaN.

        The large one reaches a clamp. NaN must stay in its token, and be one NaN at every width.
        """
        ordinary, large, broken = (self.random(1, stream) for stream in range(3))
        large = large.scaled(64.0)
        broken.x[0, self.entry.hidden_size // 2] = float("nan")
        return ordinary, large, broken

    @cached_property
    def crowd(self) -> Batch:
        """Random tokens, as many as the widest call: neighbours are cut from it."""
        return self.random(max(self.widths), _CROWD_STREAM)

    finite_needles = (0, 1)
    nan_needles = (2,)

    def copies(self, needle: int, width: int) -> Tensor:
        """y of a call of `width` tokens that all are needle number `needle`.

        Nothing but the width differs from the needle alone, and nothing but the position differs
        between its rows.
        """
        key = (needle, width)
        if key not in self._copies:
            self._copies[key] = self.run(self.needles[needle].repeated(width))
        return self._copies[key]
