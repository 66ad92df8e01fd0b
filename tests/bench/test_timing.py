"""Medians, the clock, ceilings and floors."""

from contextlib import contextmanager

import pytest
import torch

from exactmoe.bench import ceilings, timing
from exactmoe.bench.ceilings import Ceilings, ClockReader, flops_per_us, measure_ceilings
from exactmoe.bench.timing import ClockTimer, GraphTimer, Timing, timer_of

CPU = torch.device("cpu")


def test_timing_is_a_median_with_its_spread():
    assert Timing.of([3.0, 1.0, 2.0]) == Timing(2.0, 1.0, 3.0)
    assert Timing.of([float(n) for n in range(1, 11)]) == Timing(5.5, 2.0, 9.0)


def test_clock_runs_the_calls_in_turn(monkeypatch):
    now, order = [0.0], []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def call(number):
        def run():
            order.append(number)
            now[0] += number * 1e-6
            return torch.full((1, 1), float(number))

        return run

    replay = ClockTimer(seconds=13e-6).capture([call(1), call(2), call(6)])
    assert [float(y) for y in replay.outputs] == [1.0, 2.0, 6.0]
    order.clear()
    assert replay.time().us == pytest.approx(2.0)
    # 1 + 2 + 6 + 1 + 2 + ... until 13 us have passed.
    assert order == [1, 2, 3 * 2, 1, 2, 6]


def test_every_call_is_timed_at_least_once():
    calls = [lambda n=n: torch.zeros(n + 1, 1) for n in range(3)]
    replay = ClockTimer(seconds=0.0).capture(calls)
    assert replay.time().us > 0


def test_number_of_replays():
    assert timing._replays(0.2, 1e-3) == 200
    assert timing._replays(0.2, 1.0) == timing.REPLAYS[0]
    assert timing._replays(0.2, 0.0) == timing.REPLAYS[1]


def test_timer_of_a_device():
    assert isinstance(timer_of(CPU, 1.0), ClockTimer)
    assert isinstance(timer_of(torch.device("cuda"), 1.0), GraphTimer)


def test_rates_follow_from_times(timer):
    timer.us = 50.0
    assert flops_per_us(CPU, torch.float32, timer) == 2 * 1024**3 / 50
    reader = ClockReader(1000.0, timer, nbytes=8000)
    assert reader.bytes_per_us == 160
    assert reader.segments_us(4) == 25


class FalseReader:
    bytes_per_us = 100.0

    def __init__(self):
        self.asked = []

    def segments_us(self, count):
        self.asked.append(count)
        return count * 20.0


def test_floor_is_the_larger_time():
    reader = FalseReader()
    machine = Ceilings(reader, matrix_rate=10.0, matrix_type="bfloat16")
    assert machine.experts_us(8, flops=100) == 160
    assert machine.experts_us(8, flops=5000) == 500
    # The mean of the calls is between two counts: the nearer one is measured, once.
    assert machine.experts_us(8.25, flops=100) == pytest.approx(165)
    assert reader.asked == [8]
    assert machine.dense_us(3000, flops=100) == 30
    assert machine.dense_us(3000, flops=1000) == 100
    assert machine.describe() == "read 0.0001 TB/s, bfloat16 matrix 1e-05 TFLOP/s"


def test_ceilings_of_a_cpu(timer, monkeypatch):
    monkeypatch.setitem(ceilings._MATRIX_SIZE, "cpu", 16)
    machine = measure_ceilings(CPU, (8, 1000.0), "a16", timer)
    assert machine.matrix_type == "float32" and machine.matrix_rate == 2 * 16**3 / 100
    assert machine.reader.bytes_per_us == ceilings.GIB / 4 / 100


class FalseCuda:
    """The few names of torch.cuda that GraphTimer uses."""

    def __init__(self):
        self.now, self.order = 0.0, []

    def install(self, monkeypatch):
        cuda, outer = torch.cuda, self

        class Graph:
            def __init__(self):
                outer.order.append("graph")

            def replay(self):
                outer.order.append("replay")
                outer.now += 0.030

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = outer.now

            def elapsed_time(self, end):
                return end.at - self.at

        @contextmanager
        def capture(graph):
            outer.order.append("capture")
            yield
            outer.order.append("captured")

        monkeypatch.setattr(cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(cuda, "Event", Event)
        monkeypatch.setattr(cuda, "graph", capture)
        monkeypatch.setattr(cuda, "synchronize", lambda: outer.order.append("wait"))


def test_graph_timer(monkeypatch):
    cuda = FalseCuda()
    cuda.install(monkeypatch)

    def call():
        cuda.order.append("call")
        return torch.zeros(1, 1)

    replay = GraphTimer(seconds=0.0003).capture([call] * 3)
    assert cuda.order == ["wait", "graph", "capture", *["call"] * 3, "captured"]
    assert len(replay.outputs) == 3
    cuda.order.clear()
    replay.run()
    assert cuda.order == ["replay", "wait"]
    cuda.order.clear()
    # 0.03 ms a replay of three calls; 0.3 ms of replays are asked for.
    assert replay.time().us == pytest.approx(10.0)
    assert cuda.order == [*["replay"] * 6, "wait", *["replay"] * 10, "wait"]
