"""Threads of the CPU backend, and the floating-point environment that they compute in.

A kernel hands out its pieces of work by a shared counter, so the number of threads can change
nothing but speed. Each thread computes in the default environment (round to nearest, subnormals
kept) and puts back what it found, whatever `torch.set_flush_denormal` or a library left there.
"""

import ctypes
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch

from exactmoe import env
from exactmoe.errors import Unsupported

WORK_PER_THREAD = 1 << 18  # multiply-adds that pay for waking a thread (about 20 us)
_ENVIRONMENT_BYTES = 256  # larger than any fenv_t
_DEFAULT = ctypes.c_void_p(-1)  # FE_DFL_ENV of glibc and musl
_pools: dict[int, ThreadPoolExecutor] = {}


def num_threads() -> int:
    """Threads a call may use: EXACTMOE_THREADS, else as many as torch uses."""
    return env.read("EXACTMOE_THREADS") or torch.get_num_threads()


@cache
def _math_library() -> Any:
    if sys.platform != "linux":
        raise Unsupported(
            f"the CPU backend sets the floating-point environment of Linux; this is {sys.platform}"
        )
    # PyDLL keeps the GIL: these calls take nanoseconds.
    return ctypes.PyDLL(None)


def _compute(kernel: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    library = _math_library()
    found = ctypes.create_string_buffer(_ENVIRONMENT_BYTES)
    library.fegetenv(found)
    library.fesetenv(_DEFAULT)
    try:
        kernel(*arguments)
    finally:
        library.fesetenv(found)


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
