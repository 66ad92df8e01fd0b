"""quantize: what is on the disk at every moment, and runs that end between two steps."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from disk_events import DiskEvents
from exactmoe.checkpoint import Checkpoint
from exactmoe.checkpoint.rewrite import REPORT, WORK, QuantizeRequest, engine, quantize_checkpoint
from exactmoe.checkpoint.rewrite import files as writing
from exactmoe.checkpoint.rewrite import quantize as quantizing
from exactmoe.checkpoint.rewrite.files import Entry, ShardWriter
from exactmoe.errors import BitMismatch, CheckpointError
from synthetic_checkpoints import Synthetic, write_synthetic

REQUEST = QuantizeRequest("nvfp4")
INDEX = "model.safetensors.index.json"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    source = write_synthetic(tmp_path / "in", Synthetic("deepseek_v4", "deepseek", shards=3))
    (source / "tokenizer.json").write_text('{"words": 1}')
    return source


def content(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


def test_a_name_stands_for_bytes_that_are_there(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut at any moment leaves no half file; config.json is the last name of all."""
    out = tmp_path / "out"
    events = DiskEvents(out, monkeypatch)
    quantize_checkpoint(source, out, REQUEST)
    events.require_safe()
    shards = [f"model-{n:05}-of-00003.safetensors" for n in (1, 2, 3)]
    rows = [f"{WORK}/{name}.json" for name in shards]
    expected = [f"{WORK}/job.json"]
    for row, shard in zip(rows, shards, strict=True):
        expected += [row, shard]  # a shard that is there has its rows
    expected += [REPORT, "tokenizer.json", INDEX, "config.json"]
    assert events.named == expected
    assert events.log[-1] == ("remove", WORK)
    index = json.loads((out / INDEX).read_text())
    assert index["metadata"]["total_size"] == Checkpoint(out).nbytes


@pytest.mark.parametrize("place", range(11))
def test_a_run_that_ends_between_two_steps_continues(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    """Just before a file gets its name, whichever it is."""
    quantize_checkpoint(source, tmp_path / "whole", REQUEST)
    out, real, count = tmp_path / "out", os.replace, [0]

    def ending(*given: Any) -> None:
        count[0] += 1
        if count[0] == place + 1:
            raise KeyboardInterrupt
        real(*given)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", ending)
        with pytest.raises(KeyboardInterrupt):
            quantize_checkpoint(source, out, REQUEST, workers=1)
    assert not (out / "config.json").exists()
    with pytest.raises(CheckpointError, match="config.json is missing"):
        Checkpoint(out)
    quantize_checkpoint(source, out, REQUEST)
    assert content(out) == content(tmp_path / "whole")
    assert not (out / WORK).exists()


def test_a_shard_that_somebody_else_put_there_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_finish", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            quantize_checkpoint(source, out, REQUEST)
    shard = next(iter(sorted(out.glob("*.safetensors"))))
    save_file({"x": torch.zeros(3)}, shard)
    with pytest.raises(CheckpointError, match="is not what this command writes; delete the folder"):
        quantize_checkpoint(source, out, REQUEST)


def test_every_cast_is_proved(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cast that changes one code ends the run before the shard has its name."""
    real = quantizing.exact_cast

    def wrong(weight: Any, format: str) -> Any:
        made = real(weight, format)
        made.codes[0, -1, -1] ^= 0x01
        return made

    monkeypatch.setattr(quantizing, "exact_cast", lambda w, f: wrong(clone(w), f))
    with pytest.raises(BitMismatch, match=r"w[123]: the cast to nvfp4 changed a value"):
        quantize_checkpoint(source, tmp_path / "out", REQUEST)
    assert not list((tmp_path / "out").glob("*.safetensors"))


def clone(weight: Any) -> Any:
    """The codes in memory of their own: a cast shares them with what it casts."""
    return type(weight)("mxfp4", weight.codes.clone(), weight.scales)


@pytest.fixture
def short_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda d, view, start: real(d, bytes(view)[:5], start))


def test_short_writes_go_on_where_they_ended(tmp_path: Path, short_writes: None) -> None:
    values = torch.arange(37, dtype=torch.uint8)
    with ShardWriter(tmp_path / "a", [Entry("x", "U8", (37,))]) as writer:
        writer.write("x", values[:20].numpy())
        writer.write("x", values[20:].numpy(), 20)
    assert load_file(tmp_path / "a")["x"].equal(values)


def test_a_tensor_that_is_not_written_gets_no_name(tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError),
        ShardWriter(tmp_path / "a", [Entry("x", "U8", (4,)), Entry("y", "U8", (4,))]) as writer,
    ):
        writer.write("x", bytes(4))
        writer.write("y", bytes(3))
    assert not (tmp_path / "a").exists()


def test_a_partial_file_of_a_killed_run_is_written_over(tmp_path: Path) -> None:
    """Also where it is longer than the new one."""
    (tmp_path / f".a{writing.PARTIAL}").write_bytes(b"\xff" * 1000)
    with ShardWriter(tmp_path / "a", [Entry("x", "U8", (4,))]) as writer:
        writer.write("x", bytes([1, 2, 3, 4]))
    assert load_file(tmp_path / "a")["x"].tolist() == [1, 2, 3, 4]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_values_are_aligned(tmp_path: Path) -> None:
    """safetensors' own readers map them: wide values first, behind a header of whole eights."""
    entries = [Entry("b", "U8", (3,)), Entry("a", "F32", (2,)), Entry("c", "BF16", (5,))]
    with ShardWriter(tmp_path / "s", entries) as writer:
        for entry in entries:
            writer.write(entry.name, bytes(entry.nbytes))
    data = (tmp_path / "s").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0 and header.pop("__metadata__") == {"format": "pt"}
    assert [n for n, _ in sorted(header.items(), key=lambda i: i[1]["data_offsets"])] == [*"acb"]


def test_a_copied_tensor_larger_than_a_chunk(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exactmoe.checkpoint.files._CHUNK", 1000)
    quantize_checkpoint(source, tmp_path / "out", REQUEST)
    before, after = (
        {n: t for p in f.glob("*.safetensors") for n, t in load_file(p).items()}
        for f in (source, tmp_path / "out")
    )
    kept = {name for name in before if ".experts." not in name or "shared" in name}
    assert max(before[name].nbytes for name in kept) > 3000
    for name in kept:
        assert before[name].view(torch.uint8).equal(after[name].view(torch.uint8)), name
