"""The line of requests, and the thread that runs them one after the other.

One request at a time: a text then depends on its request alone, and no other request can slow one
token of it. What waits is bounded; who finds the line full is refused at once.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from exactmoe.hf.sampling import NewToken, Sampling, interruptible, sample
from exactmoe.serve.metrics import Metrics
from exactmoe.serve.text import Piece, TextBuilder

# A request's mean duration, before one has ended, and the bounds of what a client is told to wait.
_FIRST_GUESS = 1.0
_LONGEST_ADVICE = 60
# Failures one after the other, after which /health says that the model doesn't run any more.
_BROKEN_AFTER = 3

log = logging.getLogger("exactmoe.serve")


class QueueFull(Exception):
    """As many requests wait as may."""

    def __init__(self, waiting: int, retry_after: int) -> None:
        super().__init__(f"{waiting} requests wait")
        self.waiting, self.retry_after = waiting, retry_after


class Closing(Exception):
    """The server takes no more requests."""


class _Ended(Exception):
    """Raised in the model's call when the running job must end."""


@dataclass(frozen=True)
class Ended:
    """The last event of a job: stop, length, cancelled, timeout, shutdown or error."""

    outcome: str
    error: str | None = None


@dataclass(eq=False)
class Job:
    """One text to make.

    Attributes:
        ids: the prompt, int64 [1, T].
        sampling: how its tokens are chosen.
        stops: stop strings.
        emit: takes each Piece, then one Ended; called by the engine's thread, or by who ends it.
        name: of the request, for the log.
    """

    ids: Tensor
    sampling: Sampling
    stops: tuple[str, ...]
    emit: Callable[[Piece | Ended], None]
    name: str = ""
    arrived: float = field(default_factory=time.perf_counter)
    started: float | None = None
    first_token: float | None = None
    ended: float | None = None
    new_tokens: int = 0
    outcome: str | None = None
    must_end: str | None = None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.ids.shape[1]

    def facts(self) -> dict[str, Any]:
        """Of a job that has ended, plain values; nothing of what was said in it."""
        ended = self.ended or self.arrived
        return {
            "request": self.name,
            "outcome": self.outcome,
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "wait_seconds": round((self.started or ended) - self.arrived, 4),
            "seconds": round(ended - self.arrived, 4),
        }


class Engine:
    """Runs jobs on a thread of its own, in the order of their arrival.

    Attributes:
        told: called with the facts of each job that has ended.
    """

    def __init__(
        self, model: Any, tokenizer: Any, queue: int, metrics: Metrics, chunk: int | None = None
    ) -> None:
        """queue: jobs that may wait; chunk: tokens of a prompt a forward call, None: all."""
        self.model, self.tokenizer, self.queue, self.chunk = model, tokenizer, queue, chunk
        self.metrics = metrics
        self.told: Callable[[dict[str, Any]], None] = lambda facts: None
        self._waiting: deque[Job] = deque()
        self._running: Job | None = None
        self._durations: deque[float] = deque(maxlen=16)
        self._failures = 0
        self._closing = self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="exactmoe-engine", daemon=True)
        metrics.watch(lambda: self.num_running, lambda: self.num_waiting, queue)

    @property
    def num_waiting(self) -> int:
        """Jobs in the line."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """1 while a job runs."""
        return int(self._running is not None)

    @property
    def state(self) -> str:
        """ "ok", "stopping", or "failing": the last jobs all ended in an error."""
        if self._closing:
            return "stopping"
        return "failing" if self._failures >= _BROKEN_AFTER else "ok"

    def try_out(self) -> None:
        """Write one token: kernels are compiled, and a model that cannot run fails here."""
        first = torch.zeros((1, 1), dtype=torch.int64)
        sample(self.model, self.tokenizer, first, Sampling(max_new_tokens=1), lambda token: True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def require_place(self) -> None:
        """QueueFull or Closing if a job that came now would not be taken."""
        if self._closing:
            raise Closing
        # A job that the thread has not taken up yet holds the place of the running one.
        if self.num_running + len(self._waiting) > self.queue:
            raise QueueFull(len(self._waiting), self._advice())

    def submit(self, job: Job) -> None:
        """Put a job into the line; QueueFull or Closing when it is not taken."""
        with self._changed:
            self.require_place()
            self._waiting.append(job)
            self._changed.notify()

    def end(self, job: Job, outcome: str) -> None:
        """End a job before its time: at once if it waits, at the next MLP block if it runs.

        A job that has ended stays as it is.
        """
        with self._changed:
            if job in self._waiting:
                self._waiting.remove(job)
                self._finish(job, Ended(outcome))
            elif job is self._running and job.must_end is None:
                job.must_end = outcome

    def stop_taking(self) -> None:
        """Refuse new jobs from now on; those that are there go on."""
        self._closing = True

    def end_all(self) -> None:
        """End every job that is there."""
        self.stop_taking()
        with self._changed:
            jobs = [*self._waiting, *([self._running] if self._running else [])]
        for job in jobs:
            self.end(job, "shutdown")

    def close(self) -> None:
        """End every job and the thread."""
        self.end_all()
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _advice(self) -> int:
        """Seconds until a place is likely to be free: a job's mean duration."""
        known = self._durations
        mean = sum(known) / len(known) if known else _FIRST_GUESS
        return max(1, min(_LONGEST_ADVICE, math.ceil(mean)))

    def _work(self) -> None:
        with interruptible(self.model, self._check):
            while (job := self._next()) is not None:
                ended = self._run(job)
                with self._changed:
                    self._running = None
                    self._finish(job, ended)

    def _next(self) -> Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if not self._waiting:
                return None
            self._running = job = self._waiting.popleft()
        job.started = time.perf_counter()
        self.metrics.wait.observe(job.started - job.arrived)
        self.metrics.prompt_tokens.inc(job.prompt_tokens)
        return job

    def _run(self, job: Job) -> Ended:
        builder = TextBuilder(self._decode, job.stops)
        try:
            stop = sample(
                self.model,
                self.tokenizer,
                job.ids,
                job.sampling,
                lambda token: self._take(job, builder, token),
                self.chunk,
            )
        except _Ended:
            return Ended(job.must_end or "shutdown")
        except Exception as error:
            log.exception("a request failed")
            self._failures += 1
            return Ended("error", f"{type(error).__name__}: {error}")
        self._failures = 0
        self._send(job, builder.finish())
        return Ended("stop" if stop == "eos" or builder.stopped else "length")

    def _take(self, job: Job, builder: TextBuilder, token: NewToken) -> bool:
        self._check()
        if job.first_token is None:
            job.first_token = time.perf_counter()
        job.new_tokens += 1
        self.metrics.new_tokens.inc()
        self._send(job, builder.add(token))
        return not builder.stopped

    def _send(self, job: Job, piece: Piece) -> None:
        if piece.text or piece.tokens:
            job.emit(piece)

    def _check(self) -> None:
        if self._running is not None and self._running.must_end is not None:
            raise _Ended

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)  # type: ignore[no-any-return]

    def _finish(self, job: Job, ended: Ended) -> None:
        job.ended = time.perf_counter()
        job.outcome = ended.outcome
        if job.started is not None:
            self._durations.append(job.ended - job.started)
        self._count(job)
        job.emit(ended)
        self.told(job.facts())

    def _count(self, job: Job) -> None:
        metrics, ended = self.metrics, job.ended or job.arrived
        metrics.requests.labels(job.outcome).inc()
        metrics.duration.observe(ended - job.arrived)
        if job.first_token is not None and job.started is not None:
            metrics.first_token.observe(job.first_token - job.started)
            if job.new_tokens > 1:
                metrics.per_token.observe((ended - job.first_token) / (job.new_tokens - 1))
