"""Reading by place where the operating system gives fewer bytes than were asked for, or none."""

import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from exactmoe.checkpoint import Checkpoint, MoEWeights, Reader, TensorInfo, plan_layer, read_layer
from exactmoe.checkpoint import files as reading_files
from exactmoe.checkpoint import reader as reading
from exactmoe.checkpoint.files import Files
from exactmoe.checkpoint.plan import Stored
from exactmoe.errors import CheckpointError
from synthetic_checkpoints import Synthetic, write_synthetic


def info_of(name: str, file: str, nbytes: int, offset: int) -> TensorInfo:
    return TensorInfo(name, file, "U8", (nbytes,), nbytes, offset)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """preadv gives a part of what it is asked for, over the views' ends too; as many bytes."""
    real, rng, given = os.preadv, random.Random(3), list[int]()

    def preadv(descriptor: int, views: list[memoryview], start: int) -> int:
        left = rng.randint(1, max(1, min(200, sum(map(len, views)))))
        given.append(left)
        part = []
        for view in views:
            part.append(view[:left])
            left -= len(part[-1])
            if not left:
                break
        return real(descriptor, part, start)

    monkeypatch.setattr(os, "preadv", preadv)
    return given


def test_short_reads_go_on_where_they_ended(tmp_path: Path, short: list[int]) -> None:
    content = random.Random(1).randbytes(3000)
    (tmp_path / "a").write_bytes(content)
    views = [bytearray(n) for n in (1, 0, 700, 5, 64, 1, 1229)]
    with Files(tmp_path) as files:
        files.read(info_of("x", "a", 2000, 500), 507, *map(memoryview, views))
    assert b"".join(views) == content[507:2507]
    assert len(short) > 5


def test_a_layer_in_short_reads(tmp_path: Path, short: list[int]) -> None:
    checkpoint = Checkpoint(write_synthetic(tmp_path, Synthetic(hidden_size=64, num_experts=2)))
    found = read_layer(checkpoint, 1)
    assert isinstance(found, MoEWeights) and len(short) > 100
    plan = plan_layer(checkpoint, 1).experts["up"]
    for expert, source in enumerate(plan.sources):
        stored = source.parts[plan.dialect.parts[0]]
        raw = (tmp_path / stored.info.file).read_bytes()[stored.info.offset :][: stored.info.nbytes]
        assert bytes(found.bank.packed("up").codes[expert].numpy().reshape(-1)) == raw


def test_a_file_that_became_shorter(tmp_path: Path) -> None:
    """Bytes that are not there are refused by name, not left as they were in memory."""
    (tmp_path / "a").write_bytes(bytes(100))
    with Files(tmp_path) as files:
        files.read(info_of("x", "a", 100, 0), 0, memoryview(bytearray(100)))
        os.truncate(tmp_path / "a", 60)
        with pytest.raises(CheckpointError, match=r"a: it ended inside x; it was longer when"):
            files.read(info_of("x", "a", 100, 0), 0, memoryview(bytearray(100)))


def test_more_views_than_one_call_takes(tmp_path: Path) -> None:
    content = random.Random(2).randbytes(2500)
    (tmp_path / "a").write_bytes(content)
    views = [bytearray(1) for _ in content]
    with Files(tmp_path) as files:
        files.read(info_of("x", "a", 2500, 0), 0, *map(memoryview, views))
    assert b"".join(views) == content


def test_tensors_are_copied_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_files, "_CHUNK", 7)
    content = random.Random(4).randbytes(40)
    (tmp_path / "a").write_bytes(content)
    with Files(tmp_path) as files:
        chunks = list(files.chunks(info_of("x", "a", 24, 5)))
    assert [len(chunk) for chunk in chunks] == [7, 7, 7, 3]
    assert b"".join(chunks) == content[5:29]


def pieces(*places: tuple[str, int, int]) -> list[Any]:
    """Jobs of (file, start, bytes)."""
    return [
        reading._Piece(info_of("x", file, size, 0), start, torch.zeros(size, dtype=torch.uint8))
        for file, start, size in places
    ]


def places_of(jobs: list[Any]) -> list[tuple[str, int]]:
    return [(job.info.file, job.start) for job in jobs]


def test_neighbours_are_one_read() -> None:
    """Not where a byte is between them, nor where the other file goes on at that place."""
    jobs = pieces(("a", 0, 4), ("a", 4, 2), ("a", 7, 1), ("b", 8, 2), ("b", 10, 1))
    runs = [places_of(run) for run in reading._runs(jobs)]
    assert runs == [[("a", 0), ("a", 4)], [("a", 7)], [("b", 8), ("b", 10)]]


def test_batches_go_through_the_files_in_order_and_fit_a_buffer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU's reader has buffers of PIECE_BYTES."""
    monkeypatch.setattr(reading, "PIECE_BYTES", 100)
    given = [("b", 40, 250), ("a", 300, 60), ("b", 0, 40), ("a", 10, 30), ("a", 40, 30)]
    pairs = [
        (Stored(info_of(f"{file}{start}", file, size, start)), torch.zeros(size).byte())
        for file, start, size in given
    ]
    batches = list(reading._batches(pairs))
    flat = [place for batch in batches for place in places_of(batch)]
    expected = [("a", 10), ("a", 40), ("a", 300), ("b", 0), ("b", 40), ("b", 140), ("b", 240)]
    assert flat == expected
    assert all(sum(job.nbytes for job in batch) <= 100 for batch in batches)
    assert len(batches) == 5


def test_one_progress_call_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint(write_synthetic(tmp_path, Synthetic()))
    monkeypatch.setattr(reading, "PIECE_BYTES", 8000)
    inside, most, total = [0], [0], [0]

    def progress(nbytes: int) -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.002)
        total[0] += nbytes
        inside[0] -= 1

    with Reader(checkpoint, progress, threads=8) as reader:
        plans = plan_layer(checkpoint, 1).experts
        for pending in reader.begin(plans).values():
            pending.finish()
    assert most == [1]
    assert total == [sum(i.nbytes for plan in plans.values() for i in plan.tensors)]


def test_a_reader_stops_inside_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of a batch is not read for nobody."""
    checkpoint = Checkpoint(write_synthetic(tmp_path, Synthetic(num_experts=8)))
    real, calls = Files.read, [0]
    reader = Reader(checkpoint, threads=1)

    def stopping(self: Files, *given: Any) -> None:
        calls[0] += 1
        reader._stopped = True  # as __exit__ says
        real(self, *given)

    monkeypatch.setattr(Files, "read", stopping)
    with reader:
        plan = plan_layer(checkpoint, 1).experts["up"]
        pairs = [
            (
                source.parts[part],
                torch.zeros(part.shape(plan.rows, plan.columns), dtype=part.stored),
            )
            for source in plan.sources[::2]
            for part in plan.dialect.parts[:2]
        ]
        reader.fill(pairs)()
    assert calls == [1]
