"""Reading values: several threads fill memory that is there already, each byte once.

What is read is named by a plan, so a card that owns some experts reads the bytes of those only.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from os import sched_getaffinity
from threading import Condition, Lock
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from exactmoe.checkpoint.dialects import Part
from exactmoe.checkpoint.files import DTYPES, Files, place
from exactmoe.checkpoint.header import TensorInfo
from exactmoe.checkpoint.index import Checkpoint
from exactmoe.checkpoint.plan import Source, Stored, WeightPlan
from exactmoe.checkpoint.transfer import PIECE_BYTES, Lanes, writable_after
from exactmoe.checkpoint.values import converted
from exactmoe.errors import CheckpointError, ConfigError, Unsupported
from exactmoe.formats import PackedWeight
from exactmoe.runtime.free_memory import allocate

# A disk wants several requests at a time; above this many nothing was gained.
_LEAST_READERS, _MOST_READERS = 4, 16

Progress = Callable[[int], None]


@dataclass(frozen=True)
class _Piece:
    """Some bytes of a tensor, and the memory that they fill."""

    info: TensorInfo
    start: int
    target: Tensor

    @property
    def nbytes(self) -> int:
        return self.target.numel()

    @property
    def end(self) -> int:
        return self.start + self.nbytes


@dataclass(frozen=True)
class _Converted:
    """What is taken of a tensor that is stored in another dtype than it is kept in."""

    stored: Stored
    start: int
    out: Tensor

    @property
    def info(self) -> TensorInfo:
        return self.stored.info

    @property
    def nbytes(self) -> int:
        return self.out.numel() * DTYPES[self.info.dtype].itemsize

    @property
    def end(self) -> int:
        return self.start + self.nbytes


_Job = _Piece | _Converted


def default_threads() -> int:
    """Readers of a process: one a core that it may use, from 4 to 16."""
    return min(max(len(sched_getaffinity(0)), _LEAST_READERS), _MOST_READERS)


class Pending:
    """A projection that is being read."""

    def __init__(
        self,
        plan: WeightPlan,
        experts: Sequence[int],
        fields: Mapping[str, Tensor],
        reading: Callable[[], None],
    ) -> None:
        self._plan, self._experts, self._fields, self._reading = plan, experts, fields, reading

    def finish(self) -> PackedWeight:
        """Waits for the last byte.

        Raises:
            CheckpointError: a byte that the contract refuses; the message names file, tensor,
                expert, row and block.
            Unsupported: values that are legal but cannot be run, named alike.
        """
        self._reading()
        dialect = self._plan.dialect
        fields: dict[str, Any] = dict(self._fields)
        try:
            return PackedWeight(dialect.format, **fields, global_scale_op=dialect.global_scale_op)
        except ConfigError as error:
            message = self._global_ids(str(error))
            raise CheckpointError(f"{place_of(self._plan, message)}: {message}") from error
        except Unsupported as error:
            message = self._global_ids(str(error))
            raise Unsupported(f"{place_of(self._plan, message)}: {message}") from error

    def _global_ids(self, message: str) -> str:
        """A card counts its own experts; the files have the layer's."""
        return re.sub(
            r"\bexpert (\d+)", lambda found: f"expert {self._experts[int(found[1])]}", message
        )


class Reader:
    """Opens the files of a checkpoint as they are needed, and closes them together. Nothing reads
    any more when it is closed, whatever ended it.

    Args:
        checkpoint: what to read from.
        progress: called with the bytes of every read, from one thread at a time.
        threads: readers; None: as `default_threads` says.
    """

    def __init__(
        self, checkpoint: Checkpoint, progress: Progress | None = None, threads: int | None = None
    ) -> None:
        self._files = Files(checkpoint.path)
        self._progress = progress
        count = default_threads() if threads is None else threads
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="exactmoe-reader")
        self._lanes = Lanes()
        self._lock, self._state = Lock(), Condition()
        self._running, self._stopped = 0, False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._state:
            self._stopped = True
        self._pool.shutdown(cancel_futures=True)
        with self._state:
            # An interrupt while a thread starts hides it from the pool, which then does not wait.
            self._state.wait_for(lambda: self._running == 0)
        self._lanes.close()
        self._files.__exit__(kind, error, traceback)

    def copy(self, stored: Stored, out: Tensor) -> None:
        """Copies what an expert takes of a tensor into `out`, of as many values, exactly; on the
        calling thread.
        """
        ready = writable_after(out.device)
        for job in _jobs(stored, out):
            self._run([job], ready)
        self._lanes.drain()

    def fill(self, pairs: Sequence[tuple[Stored, Tensor]]) -> Callable[[], None]:
        """Begins to copy what is taken of tensors into memory, exactly, in the order of the files;
        all of one device, each contiguous. What is returned waits for the end.
        """
        if not pairs:
            return lambda: None
        ready = writable_after(pairs[0][1].device)
        futures = [self._pool.submit(self._run, jobs, ready) for jobs in _batches(pairs)]

        def wait() -> None:
            for future in futures:
                future.result()
            self._lanes.drain()

        return wait

    def tensor(self, info: TensorInfo, device: torch.device | None = None) -> Tensor:
        """One tensor in memory of its own, in the dtype of the file."""
        device = device or torch.device("cpu")
        out = allocate(info.shape, DTYPES[info.dtype], device, info.name)
        self.fill([(Stored(info), out)])()
        return out

    def begin(
        self,
        plans: Mapping[str, WeightPlan],
        share: Sequence[int] | None = None,
        device: torch.device | None = None,
        memory: Mapping[str, Mapping[str, Tensor]] | None = None,
    ) -> dict[str, Pending]:
        """Begins to read projections, all in one pass over the files.

        Args:
            plans: by projection, each of all experts of the layer.
            share: experts that are read, ascending; None: all.
            device: of the memory; None: the host.
            memory: for the fields of PackedWeight, [experts, ...], by projection; None: new one.

        Raises:
            Unsupported: the memory could not be allocated; says which card, and how much.
        """
        device = device or torch.device("cpu")
        owned: dict[str, Sequence[int]] = {
            name: range(len(plan.sources)) if share is None else share
            for name, plan in plans.items()
        }
        if memory is None:
            memory = {
                name: {
                    p.field: _empty(plan, p, len(owned[name]), device) for p in plan.dialect.parts
                }
                for name, plan in plans.items()
            }
        pairs = [
            (plan.sources[expert].parts[part], memory[name][part.field][local])
            for name, plan in plans.items()
            for part in plan.dialect.parts
            for local, expert in enumerate(owned[name])
        ]
        reading = self.fill(pairs)
        return {
            name: Pending(plan, owned[name], memory[name], reading) for name, plan in plans.items()
        }

    def weight(
        self,
        plan: WeightPlan,
        experts: Sequence[int] | None = None,
        device: torch.device | None = None,
    ) -> PackedWeight:
        """A projection of all experts, or of some, stacked; raises as `begin` and `finish`."""
        return self.begin({plan.what: plan}, experts, device)[plan.what].finish()

    def _run(self, jobs: Sequence[_Job], ready: Any) -> None:
        with self._state:
            if self._stopped:
                return
            self._running += 1
        try:
            self._do(jobs, ready)
        finally:
            with self._state:
                self._running -= 1
                self._state.notify_all()

    def _do(self, jobs: Sequence[_Job], ready: Any) -> None:
        for run in _runs(jobs):
            if self._stopped:
                return
            first = run[0]
            if isinstance(first, _Converted):
                if ready is not None:
                    torch.cuda.current_stream(first.out.device).wait_event(ready)
                self._convert(first)
            else:
                read = partial(self._files.read, first.info, first.start)
                self._lanes.send(read, [job.target for job in run], ready)  # type: ignore[union-attr]
        if self._progress is not None:
            with self._lock:
                self._progress(sum(job.nbytes for job in jobs))

    def _convert(self, job: _Converted) -> None:
        values = self._files.tensor(job.stored)
        try:
            job.out.copy_(converted(values, job.out.dtype).reshape(job.out.shape))
        except CheckpointError as error:
            raise CheckpointError(f"{job.stored}: {error}") from error


def _empty(plan: WeightPlan, part: Part, experts: int, device: torch.device) -> Tensor:
    shape = (experts, *part.shape(plan.rows, plan.columns))
    what = f"{part.field} of {plan.what}, {plan.sources[0].base} and {experts - 1} more"
    return allocate(shape, part.stored, device, what)


def _jobs(stored: Stored, out: Tensor) -> Iterator[_Job]:
    found = place(stored)
    one_byte = found.dtype.itemsize == out.element_size() == 1
    if found.dtype != out.dtype and not one_byte:
        yield _Converted(stored, found.start, out)
        return
    assert math.prod(found.shape) == out.numel()
    target = out.view(-1).view(torch.uint8)
    for begin in range(0, target.numel(), PIECE_BYTES):
        piece = target[begin : begin + PIECE_BYTES]
        yield _Piece(stored.info, found.start + begin, piece)


def _batches(pairs: Sequence[tuple[Stored, Tensor]]) -> Iterator[list[_Job]]:
    """Jobs of about PIECE_BYTES together, in the order of the files: a task for each small tensor
    would cost more than it, and neighbours are read at once.
    """
    jobs = sorted(
        (job for stored, out in pairs for job in _jobs(stored, out)),
        key=lambda job: (job.info.file, job.start),
    )
    batch: list[_Job] = []
    nbytes = 0
    for job in jobs:
        if batch and nbytes + job.nbytes > PIECE_BYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(job)
        nbytes += job.nbytes
    if batch:
        yield batch


def _runs(jobs: Sequence[_Job]) -> Iterator[list[_Job]]:
    """Jobs whose bytes follow each other in a file, together."""
    run: list[_Job] = []
    for job in jobs:
        follows = run and isinstance(job, _Piece) and isinstance(run[-1], _Piece)
        if follows and (run[-1].info.file, run[-1].end) == (job.info.file, job.start):
            run.append(job)
            continue
        if run:
            yield run
        run = [job]
    if run:
        yield run


def place_of(plan: WeightPlan, message: str) -> Stored:
    """File and tensor that a refusal of PackedWeight is about; its message names the expert."""
    expert = re.search(r"\bexpert (\d+)", message)
    source: Source = plan.sources[int(expert[1]) if expert else 0]
    start = re.match("global scale|code", message)
    field = {"global scale": "global_scale", "code": "codes"}[start[0]] if start else "scales"
    parts: list[Part] = [part for part in source.dialect.parts if part.field == field]
    return source.parts[parts[0] if parts else source.dialect.parts[0]]
