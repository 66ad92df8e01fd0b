"""How a Reader ends, and what its readers do on the way to a GPU (fakes of CUDA's objects; on a
GPU: tests/gpu/test_loading.py).
"""

import contextlib
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from exactmoe.checkpoint import Checkpoint, Quantization, Reader, plan_layer, read_layer, transfer
from exactmoe.checkpoint import reader as reading
from exactmoe.checkpoint.files import Files
from exactmoe.checkpoint.plan import Stored
from synthetic_checkpoints import Synthetic, write_synthetic


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return Checkpoint(write_synthetic(tmp_path, Synthetic(num_experts=8)))


def gaps(checkpoint: Checkpoint) -> list[tuple[Stored, torch.Tensor]]:
    """Every other expert: as many runs as tensors."""
    plan = plan_layer(checkpoint, 1).experts["up"]
    return [
        (source.parts[part], torch.zeros(part.shape(plan.rows, plan.columns), dtype=part.stored))
        for source in plan.sources[::2]
        for part in plan.dialect.parts[:2]
    ]


@pytest.mark.parametrize("pooled", [True, False], ids=["pool", "hidden from the pool"])
def test_an_error_ends_the_reads_and_waits_for_the_one_that_runs(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, pooled: bool
) -> None:
    """The memory that it fills may be given back after that, and the files are closed."""
    real, calls = Files.read, list[str]()
    begun, released = threading.Event(), threading.Event()

    def slow(self: Files, info: Any, *given: Any) -> None:
        calls.append(info.name)
        begun.set()
        assert released.wait(5)
        real(self, info, *given)
        calls.append("done")

    monkeypatch.setattr(Files, "read", slow)
    reader, pairs = Reader(checkpoint, threads=1), gaps(checkpoint)
    jobs = next(reading._batches(pairs))
    hidden = threading.Thread(target=reader._run, args=(jobs, None))
    with pytest.raises(ZeroDivisionError), reader:
        if pooled:
            reader.fill(pairs)
        else:
            hidden.start()
        assert begun.wait(5)
        threading.Timer(0.05, released.set).start()
        raise ZeroDivisionError
    assert calls == [calls[0], "done"]
    if not pooled:
        hidden.join()


def test_what_is_filled_is_there_and_lanes_are_let_go(checkpoint: Checkpoint) -> None:
    """On a GPU copies run on when the last byte was read."""
    log: list[str] = []
    reader = Reader(checkpoint)
    lane = SimpleNamespace(drain=lambda: log.append("drained"))
    reader._lanes._lanes[0, torch.device("cpu")] = lane  # type: ignore[assignment]
    with reader:
        wait = reader.fill(gaps(checkpoint))
        assert log == []
        wait()
        assert log == ["drained"]
        stored, out = gaps(checkpoint)[0]
        reader.copy(stored, out)
        assert log == ["drained"] * 2
    assert log == ["drained"] * 3 and not reader._lanes._lanes


def test_each_reader_has_a_lane_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two readers would fill one buffer at once."""
    made: list[Any] = []

    class Lane:
        def __init__(self, device: torch.device) -> None:
            made.append((threading.get_ident(), device))
            self.send = lambda *given: None

    monkeypatch.setattr(transfer, "Lane", Lane)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    lanes, cards = transfer.Lanes(), [torch.device("cuda", n) for n in (0, 1)]

    def send() -> None:
        for device in (*cards, *cards):
            lanes.send(lambda *into: None, [SimpleNamespace(device=device)], None)  # type: ignore[list-item]

    send()
    thread = threading.Thread(target=send)
    thread.start()
    thread.join()
    assert len(made) == 4 and len(set(made)) == 4


def test_memory_of_a_gpu_is_written_after_what_came_before(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = SimpleNamespace(record_event=lambda: "event")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    assert transfer.writable_after(torch.device("cuda", 0)) == "event"
    assert transfer.writable_after(torch.device("cpu")) is None


def test_a_lane_drains_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    lane = object.__new__(transfer.Lane)
    lane._stream = SimpleNamespace(synchronize=lambda: log.append("synchronized"))
    lane.drain()
    assert log == ["synchronized"]


@pytest.mark.parametrize(("cores", "readers"), [(1, 4), (4, 4), (9, 9), (64, 16)])
def test_readers_of_a_machine(cores: int, readers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "sched_getaffinity", lambda process: set(range(cores)))
    assert reading.default_threads() == readers


def test_progress_while_experts_are_quantised(tmp_path: Path) -> None:
    checkpoint = Checkpoint(write_synthetic(tmp_path, Synthetic(dialect="bf16")))
    seen: list[int] = []
    read_layer(checkpoint, 1, seen.append, Quantization("nvfp4"))
    assert sum(seen) == sum(info.nbytes for info, _ in plan_layer(checkpoint, 1).consumed())
