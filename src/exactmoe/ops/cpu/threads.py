"""Threads of the CPU backend, and the floating-point environment that they compute in.

A kernel hands out its pieces of work by a shared counter, so the number of threads can change
nothing but speed. Each thread computes in the default environment (round to nearest, subnormals
kept) and puts back what it found, whatever `torch.set_flush_denormal` or a library left there.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from exactmoe import env
from exactmoe.runtime.float_environment import default_float_environment

WORK_PER_THREAD = 1 << 18  # multiply-adds that pay for waking a thread (about 20 us)


def num_threads() -> int:
    """Threads a call may use: EXACTMOE_THREADS, else as many as torch uses."""
    return env.read("EXACTMOE_THREADS") or torch.get_num_threads()


def _compute(kernel: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    with default_float_environment():
        kernel(*arguments)


class _Pool:
    """One pool for all launches, as large as the largest of them asked for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._workers = 0
        self._threads: ThreadPoolExecutor | None = None

    def submit(self, workers: int, task: Callable[[], None]) -> None:
        """task() on each of `workers` threads."""
        with self._lock:
            pool = self._threads
            if pool is None or workers > self._workers:
                smaller = pool
                pool = ThreadPoolExecutor(workers, thread_name_prefix="exactmoe")
                self._threads, self._workers = pool, workers
                if smaller is not None:
                    smaller.shutdown(wait=False)  # ends after the tasks it has
            for _ in range(workers):
                pool.submit(task)


_pool = _Pool()


def _renew_pool() -> None:
    global _pool
    _pool = _Pool()


# A forked child has none of the threads that the pool believes in.
os.register_at_fork(after_in_child=_renew_pool)


class _Launch:
    """One kernel on several threads. Once `close` is back none of them touches its memory: a thread
    that comes later finds the launch closed.
    """

    def __init__(self, kernel: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self._kernel, self._arguments = kernel, arguments
        self._door = threading.Lock()
        self._closed = False
        self._inside: list[threading.Lock] = []  # each is held while its thread computes
        self._faults: list[BaseException] = []

    def help(self) -> None:
        """What a thread of the pool runs."""
        inside = threading.Lock()
        with inside:
            with self._door:
                if self._closed:
                    return
                self._inside.append(inside)
            try:
                _compute(self._kernel, self._arguments)
            except BaseException as fault:  # noqa: BLE001 - `close` raises it
                self._faults.append(fault)

    def close(self) -> None:
        """Waits for the threads that are inside, even through a KeyboardInterrupt, which is raised
        afterwards; so is the first error of a thread.
        """
        interrupts: list[BaseException] = []
        while True:
            try:
                with self._door:
                    self._closed = True
                for inside in self._inside:
                    with inside:
                        pass
                break
            except BaseException as interrupt:  # noqa: BLE001 - raised below
                interrupts.append(interrupt)
        for raised in (*interrupts, *self._faults):
            raise raised


def launch(kernel: Callable[..., None], arguments: tuple[Any, ...], pieces: int, work: int) -> None:
    """Run kernel(*arguments, counter) on as many threads as pieces and multiply-adds are worth.

    When it returns or raises, no thread computes in the arguments any more.
    """
    if pieces == 0:
        return
    threads = max(1, min(num_threads(), pieces, work // WORK_PER_THREAD))
    arguments = (*arguments, np.zeros(1, np.int64))
    if threads == 1:
        _compute(kernel, arguments)
        return
    shared = _Launch(kernel, arguments)
    try:
        _pool.submit(threads - 1, shared.help)
        _compute(kernel, arguments)
    finally:
        shared.close()
