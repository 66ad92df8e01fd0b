"""Threads and the floating-point environment of the CPU backend."""

import ctypes
import os
import platform
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from exactmoe import ops
from exactmoe.config import Numerics
from exactmoe.errors import ConfigError
from exactmoe.ops.cpu import threads
from paths import Call, assert_same_parts


@contextmanager
def flushing() -> Iterator[None]:
    """Subnormals are flushed to zero on this thread, as a host program may have asked for."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def subnormals_are_flushed() -> bool:
    return bool((torch.full((64,), 2.0**-126) * 0.5 == 0).all())


def small_call(rng: torch.Generator) -> Call:
    """Gates that are subnormal after their epilogue, and rows of `up` that bring h back to size."""
    call = Call.random(rng, "mxfp4", "a16", (64, 64), 9)
    assert call.gate.scales is not None and call.up.scales is not None
    scales = torch.randint(0, 21, call.gate.scales.shape, generator=rng).byte()
    gate, up = replace(call.gate, scales=scales), replace(call.up, scales=call.up.scales + 60)
    small = (call.x * 2.0**-20).bfloat16().float()
    return replace(call, x=small, gate=gate, up=up, swiglu_limit=None)


@pytest.mark.parametrize("numerics", [Numerics(slot="f32", output="f32"), Numerics()])
@pytest.mark.parametrize("count", ["1", "3"])
def test_subnormals_are_kept_and_the_environment_is_given_back(count, numerics, rng, monkeypatch):
    monkeypatch.setenv("EXACTMOE_THREADS", count)
    monkeypatch.setattr(threads, "WORK_PER_THREAD", 1)
    call = replace(small_call(rng), numerics=numerics, shared=None)
    expected = call.run(ops.path("reference"))
    with flushing():
        assert subnormals_are_flushed()
        found = call.run(ops.path("cpu"))
        assert subnormals_are_flushed()
    assert_same_parts(found, expected)


def test_without_the_default_environment_the_bits_change(rng, monkeypatch):
    """The fault that the test above looks for exists on this machine."""
    call = replace(small_call(rng), numerics=Numerics(slot="f32", output="f32"), shared=None)
    expected = call.run(ops.path("cpu"))
    monkeypatch.setattr(threads, "_compute", lambda kernel, arguments: kernel(*arguments))
    with flushing():
        found = call.run(ops.path("cpu"))
    with pytest.raises(AssertionError, match="differ"):
        assert_same_parts(found, expected)


@contextmanager
def rounding_up() -> Iterator[None]:
    """Results are rounded towards +Inf on this thread."""
    if platform.machine() != "x86_64":
        pytest.skip("the number of the rounding mode is that of x86-64")
    library, upward = ctypes.PyDLL(None), 0x800
    before = library.fegetround()
    library.fesetround(upward)
    try:
        yield
        assert library.fegetround() == upward
    finally:
        library.fesetround(before)


def test_another_rounding_mode_changes_nothing(rng, monkeypatch):
    call = Call.random(rng, "nvfp4", "a16", (64, 64), 5)
    call.numerics = Numerics(slot="f32", output="f32")
    expected = call.run(ops.path("cpu"))
    with rounding_up():
        found = call.run(ops.path("cpu"))
    assert_same_parts(found, expected)
    monkeypatch.setattr(threads, "_compute", lambda kernel, arguments: kernel(*arguments))
    with rounding_up():
        wrong = call.run(ops.path("cpu"))
    with pytest.raises(AssertionError, match="differ"):
        assert_same_parts(wrong, expected)


def test_number_of_threads(monkeypatch):
    monkeypatch.delenv("EXACTMOE_THREADS", raising=False)
    assert threads.num_threads() == torch.get_num_threads()
    monkeypatch.setenv("EXACTMOE_THREADS", "5")
    assert threads.num_threads() == 5
    monkeypatch.setenv("EXACTMOE_THREADS", "0")
    with pytest.raises(ConfigError, match="EXACTMOE_THREADS"):
        threads.num_threads()


def test_every_piece_is_taken_once(monkeypatch):
    monkeypatch.setenv("EXACTMOE_THREADS", "6")
    taken = np.zeros(1000, np.int64)

    def kernel(counts: np.ndarray, counter: np.ndarray) -> None:
        while counter[0] < len(counts):
            piece, counter[0] = counter[0], counter[0] + 1
            counts[piece] += 1

    threads.launch(kernel, (taken,), 1, 1 << 30)
    assert taken.tolist() == [1] * 1000


def test_an_error_in_another_thread_is_raised(monkeypatch):
    monkeypatch.setenv("EXACTMOE_THREADS", "2")
    both, caller = threading.Barrier(2), threading.get_ident()

    def kernel(counter: np.ndarray) -> None:
        both.wait(20)
        if threading.get_ident() != caller:
            raise ValueError("second thread")

    with pytest.raises(ValueError, match="second thread"):
        threads.launch(kernel, (), 2, 1 << 30)


def test_one_pool_serves_every_number_of_threads(monkeypatch):
    monkeypatch.setattr(threads, "_pool", type(threads._pool)())
    before = set(threading.enumerate())
    for count in (2, 5, 3, 4, 2, 5):
        monkeypatch.setenv("EXACTMOE_THREADS", str(count))
        together = threading.Barrier(count)
        threads.launch(lambda counter, all=together: all.wait(20), (), count, 1 << 30)
    deadline = time.monotonic() + 20
    while len(set(threading.enumerate()) - before) > 4 and time.monotonic() < deadline:
        time.sleep(0.01)  # a smaller pool that was replaced ends on its own
    assert len(set(threading.enumerate()) - before) == 4


def slow_on_other_threads(started: threading.Event, finished: list[int]):
    """A kernel that is done at once on this thread, after another one has begun, and slow there."""
    caller = threading.get_ident()

    def kernel(counter: np.ndarray) -> None:
        if threading.get_ident() == caller:
            assert started.wait(20)
            return
        started.set()
        time.sleep(0.5)
        finished.append(1)

    return kernel


def test_an_interrupt_while_waiting_is_raised_after_the_other_threads(monkeypatch):
    monkeypatch.setenv("EXACTMOE_THREADS", "2")
    interrupts, finished = [], []

    def handler(*_) -> None:
        interrupts.append(1)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
        with pytest.raises(KeyboardInterrupt):
            threads.launch(slow_on_other_threads(threading.Event(), finished), (), 2, 1 << 30)
        assert finished == [1]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(interrupts) > 1


def test_a_thread_that_cannot_start_is_an_error_after_the_others_are_done(monkeypatch):
    monkeypatch.setenv("EXACTMOE_THREADS", "3")
    started, finished, submit = threading.Event(), [], ThreadPoolExecutor.submit
    submitted = []

    def second_fails(pool: ThreadPoolExecutor, *task):
        if submitted:
            assert started.wait(20)
            raise RuntimeError("can't start new thread")
        submitted.append(1)
        return submit(pool, *task)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", second_fails)
    with pytest.raises(RuntimeError, match="can't start"):
        threads.launch(slow_on_other_threads(started, finished), (), 3, 1 << 30)
    assert finished == [1]


def test_a_thread_that_comes_too_late_computes_nothing(monkeypatch):
    monkeypatch.setenv("EXACTMOE_THREADS", "2")
    late, calls = [], []
    monkeypatch.setattr(ThreadPoolExecutor, "submit", lambda pool, task: late.append(task))
    threads.launch(lambda counter: calls.append(1), (), 2, 1 << 30)
    late[0]()
    assert (len(late), calls) == (1, [1])


def test_a_forked_child_computes_with_threads_of_its_own(rng, monkeypatch):
    monkeypatch.setenv("EXACTMOE_THREADS", "2")
    monkeypatch.setattr(threads, "WORK_PER_THREAD", 1)
    call = Call.random(rng, "nvfp4", "a16", (64, 64), 5)
    expected = call.run(ops.path("cpu"))
    child = os.fork()
    if child == 0:
        status = 1
        try:
            assert_same_parts(call.run(ops.path("cpu")), expected)
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
