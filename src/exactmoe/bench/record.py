"""Record: one measured number and what belongs to it."""

import csv
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from exactmoe.bench.timing import Timing

EXPERTS, SORT, BLOCK, DENSE = "experts", "with sort", "whole block", "dense"
OURS = "exactmoe"


@dataclass(frozen=True)
class Record:
    """One row of a table.

    Attributes:
        part: "experts" (sort made before), "with sort", "whole block", or "dense" and its size.
        what: OURS, OURS and a tile, or a peer.
        tokens: width of the call; 0 where a peer did not run at all.
        timing: None where it failed.
        floor_us: of this width, None where no floor is known.
        nbytes: bytes of weights that the call must read.
        distinct_experts: the mean of the timed calls.
        error: relative L2 distance from float64 in sampled rows.
        quantized_error: the same from operands quantised as class `a8` does; ours in `a8` only.
        same_bits: whether a token had the same bytes as at the first width.
        note: why it failed, or what else is to be said.
    """

    part: str
    what: str
    tokens: int
    timing: Timing | None = None
    floor_us: float | None = None
    nbytes: float | None = None
    distinct_experts: float | None = None
    error: float | None = None
    quantized_error: float | None = None
    same_bits: bool | None = None
    note: str = ""

    @property
    def us(self) -> float | None:
        """Median microseconds of one call."""
        return None if self.timing is None else self.timing.us

    @property
    def share(self) -> float | None:
        """Of the floor: 1 is as fast as the machine reads and multiplies."""
        if self.timing is None or self.floor_us is None:
            return None
        return self.floor_us / self.timing.us

    @property
    def gigabytes_per_second(self) -> float | None:
        """Of distinct weights."""
        if self.timing is None or self.nbytes is None:
            return None
        return self.nbytes / self.timing.us / 1e3

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for CSV and JSON; None where there is no number."""
        values = asdict(self)
        del values["timing"], values["nbytes"]
        timing = self.timing
        values |= {
            "us": self.us,
            "low_us": None if timing is None else timing.low_us,
            "high_us": None if timing is None else timing.high_us,
            "share": self.share,
            "gigabytes_per_second": self.gigabytes_per_second,
        }
        if self.error is not None and self.error != self.error:
            values["error"] = "nan"  # JSON has no NaN
        return values


_COLUMNS = tuple(Record("", "", 0).to_dict())


def write_csv(path: str, records: Iterable[Record], same: Mapping[str, Any]) -> None:
    """One line a record; `same` (machine, shape, command) stands in the first columns of each."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, (*same, *_COLUMNS))
        writer.writeheader()
        for record in records:
            values = {name: _short(value) for name, value in record.to_dict().items()}
            writer.writerow({**same, **values})


def _short(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value
