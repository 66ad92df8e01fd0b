"""Streaming: what is read, by whom, into which memory, and what an error leaves behind."""

import _thread
import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_maker import glm_config, glm_tensors, write
from exactmoe.bank import ExpertBank, Partition, SplitBank
from exactmoe.checkpoint import (
    Checkpoint,
    MoEWeights,
    Quantization,
    Reader,
    Share,
    plan_layer,
    read_layer,
    shares_of,
    transfer,
)
from exactmoe.checkpoint import reader as reading
from exactmoe.checkpoint.files import Files
from exactmoe.errors import CheckpointError, Unsupported
from exactmoe.load import load_layer
from exactmoe.runtime import free_memory
from synthetic_checkpoints import DIALECTS, Synthetic, write_synthetic

CPU = torch.device("cpu")
PARTITION = Partition.of_lists([[0, 3], [1, 2]], 4)


def parts_of(bank: ExpertBank) -> dict[str, torch.Tensor]:
    return dict(bank.named_buffers())


def bytes_read(run: Any) -> int:
    """What the process read meanwhile, by the operating system's count."""

    def counted() -> int:
        return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])

    before = counted()
    run()
    return counted() - before


@pytest.mark.parametrize("dialect", DIALECTS)
def test_each_card_gets_its_own_experts(tmp_path: Path, dialect: str) -> None:
    """The same bytes as a whole bank has, whatever the dialect; stacked ones too."""
    path = write_synthetic(tmp_path, Synthetic(dialect=dialect))
    checkpoint = Checkpoint(path)
    whole = read_layer(checkpoint, 1)
    cards = read_layer(checkpoint, 1, shares=shares_of(PARTITION, [CPU, CPU]))
    assert isinstance(whole, MoEWeights) and isinstance(cards, MoEWeights)
    assert isinstance(whole.bank, ExpertBank) and isinstance(cards.bank, SplitBank)
    assert cards.bank.partition == PARTITION
    for card, owned in enumerate(PARTITION.experts):
        found = parts_of(cards.bank[card])
        for name, buffer in parts_of(whole.bank).items():
            assert found[name].equal(buffer[list(owned)]), (card, name)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_only_owned_bytes_are_read(tmp_path: Path, dialect: str) -> None:
    path = write_synthetic(tmp_path, Synthetic(dialect=dialect, hidden_size=256, num_experts=8))
    checkpoint = Checkpoint(path)
    plan = plan_layer(checkpoint, 1)
    dense = sum(i.nbytes for w in plan.dense.values() for i in w.tensors)
    dense += sum(info.nbytes for info in plan.router.values())
    infos = {i.name: i for w in plan.experts.values() for i in w.tensors}
    experts = sum(info.nbytes for info in infos.values())
    for owned in ((0, 1, 2, 3), (4, 5, 6, 7)):
        share = Share(CPU, owned)
        found = bytes_read(lambda share=share: read_layer(checkpoint, 1, shares=[share]))
        assert experts // 2 + dense <= found <= 0.55 * experts + dense
    assert (
        experts + dense <= bytes_read(lambda: read_layer(checkpoint, 1)) <= 1.05 * experts + dense
    )


def test_progress_counts_every_byte_once(tmp_path: Path) -> None:
    checkpoint = Checkpoint(write_synthetic(tmp_path, Synthetic()))
    consumed = sum(info.nbytes for info, _ in plan_layer(checkpoint, 1).consumed())
    seen: list[int] = []
    read_layer(checkpoint, 1, seen.append)
    assert sum(seen) == consumed


def test_pieces_are_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors larger than a piece, of a length that is no multiple of one."""
    checkpoint = Checkpoint(write_synthetic(tmp_path, Synthetic()))
    whole = read_layer(checkpoint, 1)
    monkeypatch.setattr(reading, "PIECE_BYTES", 1000)
    pieces = read_layer(checkpoint, 1)
    assert isinstance(whole, MoEWeights) and isinstance(pieces, MoEWeights)
    found = dict(pieces.bank.named_buffers())
    assert all(found[name].equal(buffer) for name, buffer in whole.bank.named_buffers())


def test_nothing_of_a_file_stays_mapped_or_open(tmp_path: Path) -> None:
    checkpoint = Checkpoint(write_synthetic(tmp_path, Synthetic()))
    weights = read_layer(checkpoint, 1)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert not opened_in(tmp_path)
    assert weights is not None


def opened_in(folder: Path) -> list[str]:
    links = Path("/proc/self/fd").iterdir()
    paths = [os.readlink(link) for link in links if link.is_symlink()]
    return [path for path in paths if path.startswith(str(folder))]


def readers() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("exactmoe-reader")]


@pytest.mark.parametrize("end", ["^C", "disk"])
def test_an_end_in_between_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Threads are joined, files closed, and the memory is free again."""
    checkpoint = Checkpoint(write_synthetic(tmp_path, Synthetic()))
    read, count, stopped = Files.read, [0], list[bool]()
    empty = reading.allocate

    def failing(self: Files, *arguments: Any) -> None:
        count[0] += 1
        if count[0] >= 5 and end == "disk":
            raise CheckpointError("the file cannot be read: disk")
        read(self, *arguments)

    def remembered(*arguments: Any) -> torch.Tensor:
        tensor = empty(*arguments)
        alive.append(tensor.untyped_storage()._weak_ref())  # type: ignore[no-untyped-call]
        return tensor

    alive: list[Any] = []
    monkeypatch.setattr(Files, "read", failing)
    monkeypatch.setattr(reading, "allocate", remembered)
    monkeypatch.setattr(reading, "PIECE_BYTES", 1000)

    def stop(_: int) -> None:
        if end == "^C" and count[0] >= 5 and not stopped:
            stopped.append(True)
            _thread.interrupt_main()  # the main thread waits for the readers now
            time.sleep(0.2)

    with pytest.raises((KeyboardInterrupt, CheckpointError)):
        read_layer(checkpoint, 1, stop)
    deadline = time.monotonic() + 60
    while readers() and time.monotonic() < deadline:
        time.sleep(0.01)  # one that had just been started ends by itself
    assert not readers()
    assert not opened_in(tmp_path)
    gc.collect()
    assert alive and all(torch.UntypedStorage._expired(ref) for ref in alive)
    monkeypatch.undo()
    assert isinstance(read_layer(checkpoint, 1), MoEWeights)


def test_a_card_without_room_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_synthetic(tmp_path, Synthetic())

    def full(*shape: Any, device: Any, **rest: Any) -> torch.Tensor:
        if torch.device(device).type == "meta":
            return real(*shape, device=device, **rest)
        raise torch.OutOfMemoryError("CUDA out of memory")

    real = torch.empty
    monkeypatch.setattr(free_memory, "free_bytes", lambda device: 5 << 20)
    monkeypatch.setattr(free_memory.torch, "empty", full)
    said = r"card cpu has no room for .*experts.*: 0\.0 MiB are asked for, 5\.0 MiB is free"
    with pytest.raises(Unsupported, match=said):
        load_layer(path, 1)


def test_a_refused_value_has_the_id_of_the_layer(tmp_path: Path, rng: torch.Generator) -> None:
    """A card counts its own experts."""
    tensors = glm_tensors(rng)
    name = "model.language_model.layers.1.mlp.experts.3.up_proj.weight_scale"
    tensors[name].view(torch.uint8)[2, 1] = 0x7F
    checkpoint = Checkpoint(write(tmp_path, glm_config(), tensors))
    with pytest.raises(CheckpointError, match=r"experts\.3\.up_proj.*at expert 3, row 2, block 1"):
        read_layer(checkpoint, 1, shares=[Share(CPU, (1, 3))])


def test_quantised_at_load_by_share(tmp_path: Path) -> None:
    checkpoint = Checkpoint(write_synthetic(tmp_path, Synthetic(dialect="bf16")))
    whole = read_layer(checkpoint, 1, None, Quantization("nvfp4"))
    cards = read_layer(checkpoint, 1, None, Quantization("nvfp4"), shares_of(PARTITION, [CPU, CPU]))
    assert isinstance(whole, MoEWeights) and isinstance(cards, MoEWeights)
    assert isinstance(cards.bank, SplitBank)
    for name in ("gate", "up", "down"):
        found, expected = cards.bank.packed(name), whole.bank.packed(name)
        assert found.codes.equal(expected.codes)
        assert found.global_scale is not None and expected.global_scale is not None
        assert found.global_scale.equal(expected.global_scale)


class FalseStream:
    """What the lanes ask of a stream and of an event, in order."""

    log: list[str] = []

    def __init__(self, device: Any = None) -> None:
        self.device = device

    def wait_event(self, event: Any) -> None:
        self.log.append("wait")

    def record(self, stream: Any) -> None:
        self.log.append("record")

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def __enter__(self) -> None:
        self.log.append("on stream")

    def __exit__(self, *arguments: Any) -> None:
        self.log.append("off stream")


def test_a_lane_fills_one_buffer_while_the_other_empties(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU: tests/gpu/test_loading.py."""
    real = torch.empty
    monkeypatch.setattr(torch.cuda, "Stream", FalseStream)
    monkeypatch.setattr(torch.cuda, "Event", FalseStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(transfer, "PIECE_BYTES", 8)
    monkeypatch.setattr(torch, "empty", lambda size, dtype, pin_memory: real(size, dtype=dtype))
    lane = transfer.Lane(CPU)
    target = torch.zeros(5, dtype=torch.uint8)
    for number in (1, 2, 3):

        def read(into: memoryview, number: int = number) -> None:
            into[:] = bytes([number] * 5)

        FalseStream.log.clear()
        lane.send(read, [target[:2], target[2:]], FalseStream())
        expected = ["synchronize", "wait", "on stream", "off stream", "record"]
        assert FalseStream.log == expected
        assert target.tolist() == [number] * 5
    # The third piece went over the first one's buffer.
    assert [buffer[:5].tolist() for buffer in lane._buffers] == [[3] * 5, [2] * 5]


def test_one_reader_fills_and_waits(tmp_path: Path) -> None:
    checkpoint = Checkpoint(write_synthetic(tmp_path, Synthetic()))
    info = plan_layer(checkpoint, 1).router["weight"]
    with Reader(checkpoint, threads=1) as reader:
        found = reader.tensor(info)
        assert reader.fill([])() is None
    assert found.dtype == torch.bfloat16 and tuple(found.shape) == info.shape
