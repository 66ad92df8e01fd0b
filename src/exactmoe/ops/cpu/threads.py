"""Threads of the CPU backend, and the floating-point environment that they compute in.

A kernel hands out its pieces of work by a shared counter, so the number of threads can change
nothing but speed. Each thread computes in the default environment (round to nearest, subnormals
kept) and puts back what it found, whatever `torch.set_flush_denormal` or a library left there.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from exactmoe import env
from exactmoe.runtime.float_environment import default_float_environment

WORK_PER_THREAD = 1 << 18  # multiply-adds that pay for waking a thread (about 20 us)
_pools: dict[int, ThreadPoolExecutor] = {}


def num_threads() -> int:
    """Threads a call may use: EXACTMOE_THREADS, else as many as torch uses."""
    return env.read("EXACTMOE_THREADS") or torch.get_num_threads()


def _compute(kernel: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    with default_float_environment():
        kernel(*arguments)


def _pool(workers: int) -> ThreadPoolExecutor:
    if workers not in _pools:
        _pools[workers] = ThreadPoolExecutor(workers, thread_name_prefix="exactmoe")
    return _pools[workers]


# A forked child has none of the threads that these pools believe in.
os.register_at_fork(after_in_child=_pools.clear)


def launch(kernel: Callable[..., None], arguments: tuple[Any, ...], pieces: int, work: int) -> None:
    """Run kernel(*arguments, counter) on as many threads as pieces and multiply-adds are worth."""
    if pieces == 0:
        return
    threads = max(1, min(num_threads(), pieces, work // WORK_PER_THREAD))
    arguments = (*arguments, np.zeros(1, np.int64))
    if threads == 1:
        _compute(kernel, arguments)
        return
    futures = [_pool(threads - 1).submit(_compute, kernel, arguments) for _ in range(threads - 1)]
    try:
        _compute(kernel, arguments)
    finally:
        for future in futures:
            future.result()
