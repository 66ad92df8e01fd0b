"""The run over the shards: bounded memory, several threads, and it continues where it was killed.

An output shard has the name of the input shard that holds its codes. It is there or it is not:
tensors go to their places in a partial file, which gets its name when it is whole. config.json
comes last, so nothing takes an unfinished folder for a checkpoint. What a run must know of those
before it lies in a folder WORK of the output, which the end removes.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exactmoe.checkpoint.header import TensorInfo, read_header
from exactmoe.checkpoint.index import INDEX, Checkpoint
from exactmoe.checkpoint.quantize import MAX_WORKERS
from exactmoe.checkpoint.rewrite.files import (
    PARTIAL,
    Entry,
    RawFiles,
    ShardWriter,
    copy_file,
    entries_of,
    write_json,
    write_tensor,
)
from exactmoe.checkpoint.rewrite.units import Projection, Rewriting, Unit
from exactmoe.errors import CheckpointError, ConfigError, ExactMoEError
from exactmoe.formats import PackedWeight

WORK = ".exactmoe"
_JOB = "job.json"
# The rows, in the output.
REPORT = "exactmoe_report.json"
# Other weights, and what this package writes by itself.
_NOT_COPIED = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf", PARTIAL)
_WRITTEN = ("config.json", "hf_quant_config.json", REPORT)


@dataclass(frozen=True)
class Row:
    """What happened to one projection.

    Attributes:
        name: in the output, without the last part.
        what: "routed experts", "shared expert", "dense MLP" or "other".
        before, after: layouts.
        exact: every value is what it was (proved); else quantised.
        sqnr_db: of a quantised one: 10 log10(sum of w^2 / sum of error^2); None: no error at all.
    """

    name: str
    what: str
    before: str
    after: str
    exact: bool
    sqnr_db: float | None = None


@dataclass(frozen=True)
class Made:
    """A rewritten projection: its weight (E = 1), its row, and its extra tensors by name."""

    weight: PackedWeight
    row: Row
    extra: tuple[tuple[str, Tensor], ...] = ()


Make = Callable[[Unit, RawFiles], Sequence[Made]]
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Job:
    """A rewriting of a checkpoint.

    Attributes:
        checkpoint: the input.
        out: folder of the output.
        asked: what was asked for; a folder that another request began is refused.
        rewriting: the plan.
        make: reads and rewrites one unit, on any thread.
        config: config.json of the output.
    """

    checkpoint: Checkpoint
    out: Path
    asked: dict[str, Any]
    rewriting: Rewriting
    make: Make
    config: dict[str, Any]


def run(job: Job, workers: int | None = None, progress: Progress | None = None) -> list[Row]:
    """Writes the output, or what is missing of it; returns the rows in the order of the names.

    Args:
        job: what to do.
        workers: threads; None: as many as torch has, at most MAX_WORKERS. Each holds one unit.
        progress: called with the bytes of the input that are done with, on the calling thread.

    Raises:
        ConfigError: `out` is the input, holds other files, or another request began it.
        CheckpointError: a value of the input is refused.
    """
    if workers is not None and workers < 1:
        raise ConfigError(f"workers is {workers}; allowed: from 1")
    count = min(MAX_WORKERS, torch.get_num_threads()) if workers is None else workers
    work = _begin(job)
    rows: list[Row] = []
    inputs = [_Shard(job, file) for file in _files(job.checkpoint)]
    shards = [shard for shard in inputs if shard.entries]
    gone = sum(shard.nbytes for shard in inputs if not shard.entries)
    if progress is not None and gone:  # all of these files is replaced elsewhere
        progress(gone)
    with RawFiles(job.checkpoint.path) as raw:
        try:
            for shard in shards:
                if not (job.out / shard.file).exists():
                    rows += shard.write(raw, count, progress)
                    continue
                rows += _rows_of(work, shard.file)
                shard.require_as_written()
                if progress is not None:
                    progress(shard.nbytes)
        except ExactMoEError:
            # Another request may follow; one that has begun to write is kept for the same.
            if not any((job.out / shard.file).exists() for shard in shards):
                shutil.rmtree(work)
            raise
    rows.sort(key=lambda row: row.name)
    write_json(job.out / REPORT, [asdict(row) for row in rows])
    _finish(job, shards)
    return rows


def _files(checkpoint: Checkpoint) -> list[str]:
    return list(dict.fromkeys(info.file for info in checkpoint.tensors.values()))


def _begin(job: Job) -> Path:
    source, out, work = job.checkpoint.path, job.out, job.out / WORK
    if out.resolve() == source.resolve() or source.resolve() in out.resolve().parents:
        raise ConfigError(f"OUT is {out}, inside {source}; allowed: another folder")
    if out.exists() and not out.is_dir():
        raise ConfigError(f"OUT is {out}, a file; allowed: a folder that is new or empty")
    stats = {file: (source / file).stat() for file in sorted(_files(job.checkpoint))}
    asked: dict[str, Any] = {
        "asked": job.asked,
        "config": job.config,
        "files": {file: [s.st_size, s.st_mtime_ns] for file, s in stats.items()},
    }
    asked = json.loads(json.dumps(asked))
    if (work / _JOB).exists():
        if json.loads((work / _JOB).read_text(encoding="utf-8")) != asked:
            raise ConfigError(
                f"{out} was begun by another request, or the input has changed since; allowed: "
                "the same command again, or another folder"
            )
        return work
    if out.exists() and any(path.name != WORK for path in out.iterdir()):
        raise ConfigError(f"{out} is not empty; allowed: a folder that is new or empty")
    work.mkdir(parents=True, exist_ok=True)
    write_json(work / _JOB, asked)
    return work


def _rows_of(work: Path, file: str) -> list[Row]:
    content = json.loads((work / f"{file}.json").read_text(encoding="utf-8"))
    return [Row(**row) for row in content]


class _Shard:
    """One output shard: what it holds, and the tasks that write it."""

    def __init__(self, job: Job, file: str) -> None:
        self.job, self.file = job, file
        rewriting, tensors = job.rewriting, job.checkpoint.tensors.values()
        self.units = [u for u in rewriting.units if any(p.file == file for p in u.projections)]
        here = [info for info in tensors if info.file == file]
        self.nbytes = sum(info.nbytes for info in here)
        self.copied = [info for info in here if info.name not in rewriting.replaced]
        self.entries = [Entry(i.name, i.dtype, i.shape) for i in self.copied]
        for unit in self.units:
            self.entries += unit.entries(file)

    def write(self, raw: RawFiles, workers: int, progress: Progress | None) -> list[Row]:
        rows: list[Row] = []
        replaced = self.nbytes - sum(info.nbytes for info in self.copied)
        path = self.job.out / self.file
        with ShardWriter(path, self.entries) as writer, ThreadPoolExecutor(workers) as pool:
            tasks: dict[Future[list[Row]], int] = {}
            for unit in self.units:
                tasks[pool.submit(self._rewrite, unit, raw, writer)] = replaced // len(self.units)
            for info in self.copied:
                tasks[pool.submit(_copy, info, raw, writer)] = info.nbytes
            try:
                for task in as_completed(tasks):
                    rows += task.result()
                    if progress is not None:
                        progress(tasks[task])
                if progress is not None:  # what the units do not share evenly
                    progress(self.nbytes - sum(tasks.values()))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
            # Before the shard gets its name: a shard that is there has its rows.
            write_json(self.job.out / WORK / f"{self.file}.json", [asdict(row) for row in rows])
        return rows

    def _rewrite(self, unit: Unit, raw: RawFiles, writer: ShardWriter) -> list[Row]:
        rows = []
        for projection, made in zip(unit.projections, self.job.make(unit, raw), strict=True):
            # A gate and an up that lie in two shards are made for each of them.
            if projection.file == self.file:
                _write(unit, projection, made, writer)
                rows.append(made.row)
        return rows

    def require_as_written(self) -> None:
        """A shard that an earlier run wrote still has the tensors of this job."""
        found = {i.name: (i.dtype, i.shape) for i in read_header(self.job.out, self.file)}
        if found != {e.name: (e.dtype, e.shape) for e in self.entries}:
            raise CheckpointError(
                f"{self.job.out / self.file} is not what this command writes; delete the folder"
            )


def _copy(info: TensorInfo, raw: RawFiles, writer: ShardWriter) -> list[Row]:
    begin = 0
    for chunk in raw.chunks(info):
        writer.write(info.name, chunk, begin)
        begin += len(chunk)
    return []


def _write(unit: Unit, projection: Projection, made: Made, writer: ShardWriter) -> None:
    entries = entries_of(projection.base, unit.target, projection.rows, projection.columns)
    for part, entry in zip(unit.target.parts, entries, strict=True):
        value: Tensor = getattr(made.weight, part.field)
        assert value.dtype == part.stored and value.nbytes == entry.nbytes
        write_tensor(writer, entry.name, value)
    for name, tensor in made.extra:
        write_tensor(writer, name, tensor)


def _finish(job: Job, shards: Sequence[_Shard]) -> None:
    """Other files, index and config, in this order; then the folder is a checkpoint."""
    source, out = job.checkpoint.path, job.out
    weight_map = {entry.name: shard.file for shard in shards for entry in shard.entries}
    total = sum(entry.nbytes for shard in shards for entry in shard.entries)
    for path in sorted(source.iterdir()):
        own = path.name.startswith(".") or path.name in _WRITTEN
        if path.is_file() and not own and not path.name.endswith(_NOT_COPIED):
            copy_file(path, out / path.name)
    if (source / INDEX).exists() or len(set(weight_map.values())) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(out / INDEX, index)
    write_json(out / "config.json", job.config)
    shutil.rmtree(out / WORK)
