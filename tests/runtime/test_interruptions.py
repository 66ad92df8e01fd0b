"""Calls from inside a call, forks during a call, reservations that fail or come in between."""

import os
import signal
import threading
import time

import pytest
import torch

from exactmoe import DenseMLP, Limits, MoELayer
from exactmoe.errors import ExactMoEError, Unsupported
from exactmoe.runtime.workspace import Arena, arena
from layers import assert_same_bits, layer_of, normal, random_bank, random_call

CPU = torch.device("cpu")


def make(rng, max_rows: int = 4, experts: int = 4, size: int = 64) -> MoELayer:
    bank = random_bank(rng, "nvfp4", experts, size, size)
    return layer_of(bank, 2, "cpu", limits=Limits(max_rows=max_rows))


def in_a_call(monkeypatch, layer: MoELayer, action) -> None:
    """Runs `action` once, in the middle of the layer's next call, as a signal handler would."""
    found, actions = layer._experts, [action]

    def interrupted(*arguments):
        if actions:
            actions.pop()()
        return found(*arguments)

    monkeypatch.setattr(layer, "_experts", interrupted)


@pytest.mark.parametrize("inner", ["experts", "dense", "reserve", "fill"])
def test_a_call_inside_a_call_is_refused_and_the_outer_one_is_right(inner, rng, monkeypatch):
    layer = make(rng)
    other = DenseMLP(normal(rng, 32, 64), normal(rng, 32, 64), normal(rng, 64, 32))
    call, another = random_call(rng, layer, 9), random_call(rng, layer, 9)
    expected = layer.experts(*call)
    actions = {
        "experts": lambda: layer.experts(*another),
        "dense": lambda: other(another[0]),
        "reserve": lambda: layer.reserve(9),
        "fill": lambda: arena(CPU).fill(0xFF),
    }

    def refused() -> None:
        with pytest.raises(Unsupported, match="call is running on this thread"):
            actions[inner]()

    in_a_call(monkeypatch, layer, refused)
    assert_same_bits(layer.experts(*call), expected)
    assert layer.limits.max_rows == 4
    actions[inner]()  # allowed again
    assert_same_bits(layer.experts(*call), expected)


def test_a_call_from_a_signal_handler_never_changes_the_outer_result(rng, monkeypatch):
    layer = make(rng)
    call, another = random_call(rng, layer, 9), random_call(rng, layer, 9)
    expected, refusals = layer.experts(*call), []

    def handler(*_) -> None:
        try:
            layer.experts(*another)
        except ExactMoEError as error:
            refusals.append(error)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        in_a_call(monkeypatch, layer, lambda: signal.raise_signal(signal.SIGUSR1))
        assert_same_bits(layer.experts(*call), expected)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(refusals) == 1


def test_an_error_in_a_call_leaves_the_arena_usable_by_all_threads(rng, monkeypatch):
    layer = make(rng)
    call = random_call(rng, layer, 9)
    expected, results = layer.experts(*call), []

    def fail() -> None:
        raise KeyboardInterrupt

    in_a_call(monkeypatch, layer, fail)
    with pytest.raises(KeyboardInterrupt):
        layer.experts(*call)
    thread = threading.Thread(target=lambda: results.append(layer.experts(*call)), daemon=True)
    thread.start()
    thread.join(20)
    assert_same_bits(results[0], expected)
    assert_same_bits(layer.experts(*call), expected)


def status_of_child(work) -> int:
    """Exit status of a forked child that runs `work`; -14 when it hung for 20 seconds."""
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_child_forked_while_another_thread_calls_computes_the_same(rng, monkeypatch):
    layer = make(rng)
    call = random_call(rng, layer, 9)
    expected, inside, done = layer.experts(*call), threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        done.wait(60)

    in_a_call(monkeypatch, layer, wait)
    thread = threading.Thread(target=lambda: layer.experts(*call), daemon=True)
    thread.start()
    assert inside.wait(20)

    def in_child() -> None:
        assert_same_bits(layer.experts(*call), expected)
        layer.reserve(9)
        assert_same_bits(layer.experts(*call), expected)

    try:
        assert status_of_child(in_child) == 0
    finally:
        done.set()
        thread.join(20)


def test_a_child_forked_in_a_call_has_memory_of_its_own(rng, monkeypatch):
    layer = make(rng)
    call, another = random_call(rng, layer, 9), random_call(rng, layer, 9)
    expected, other = layer.experts(*call), layer.experts(*another)
    statuses = []

    def fork() -> None:
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            assert_same_bits(layer.experts(*another), other)
            statuses.append("child")
        else:
            statuses.append(child)

    in_a_call(monkeypatch, layer, fork)
    try:
        result = layer.experts(*call)
        same = torch.equal(result.view(torch.int16), expected.view(torch.int16))
    finally:
        if statuses == ["child"]:
            os._exit(0 if same else 3)
    assert same
    assert os.waitstatus_to_exitcode(os.waitpid(statuses[0], 0)[1]) == 0


def test_a_reservation_that_fails_leaves_the_layer_as_it_was(rng):
    layer = make(rng)
    call = random_call(rng, layer, 9)
    expected, before = layer.experts(*call), (arena(CPU).generation, arena(CPU).nbytes)
    needed = layer.workspace_bytes(10**13)
    with pytest.raises(Unsupported, match=rf"{needed} bytes.*cpu"):
        layer.reserve(10**13)
    assert layer.limits == Limits(max_rows=4)
    assert (arena(CPU).generation, arena(CPU).nbytes) == before
    assert_same_bits(layer.experts(*call), expected)


def test_limits_change_by_reserve_only(rng):
    layer = make(rng)
    with pytest.raises(AttributeError, match="limits"):
        layer.limits = Limits(max_rows=4096)
    layer.reserve(7)
    assert layer.limits == Limits(max_rows=7)


def test_a_reservation_waits_for_the_call_of_another_thread(rng, monkeypatch):
    layer = make(rng)
    call = random_call(rng, layer, 9)
    expected, threads = layer.experts(*call), []

    def reserve_elsewhere() -> None:
        threads.append(threading.Thread(target=lambda: layer.reserve(1), daemon=True))
        threads[0].start()
        time.sleep(0.2)
        assert layer.limits.max_rows == 4

    in_a_call(monkeypatch, layer, reserve_elsewhere)
    assert_same_bits(layer.experts(*call), expected)
    threads[0].join(20)
    assert layer.limits.max_rows == 1
    assert_same_bits(layer.experts(*call), expected)


def test_reservations_of_other_sizes_between_the_calls_change_nothing(rng):
    layer = make(rng)
    call = random_call(rng, layer, 40)
    expected, stop = layer.experts(*call), threading.Event()

    def reserve() -> None:
        sizes = [1, 7, 30, 16]
        while not stop.is_set():
            sizes.append(sizes.pop(0))
            layer.reserve(sizes[0])

    thread = threading.Thread(target=reserve, daemon=True)
    thread.start()
    try:
        for _ in range(60):
            assert_same_bits(layer.experts(*call), expected)
    finally:
        stop.set()
        thread.join(20)


def test_an_arena_of_a_child_keeps_its_size():
    held = Arena(CPU)
    held.reserve(1000)
    generation = held.generation
    held.renew()
    held.exclusively(lambda: None)
    assert held.nbytes == 1000
    assert held.generation != generation
