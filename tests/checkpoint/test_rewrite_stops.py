"""quantize: refusals in the middle of a run, inputs that change, shards that cut a unit."""

import json
import os
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from exactmoe.checkpoint import Checkpoint, read_layer
from exactmoe.checkpoint.dialects import MODELOPT_NVFP4
from exactmoe.checkpoint.rewrite import WORK, QuantizeRequest, engine, quantize_checkpoint
from exactmoe.checkpoint.rewrite import quantize as quantizing
from exactmoe.checkpoint.rewrite.units import require_whole_stacks
from exactmoe.errors import ConfigError, Unsupported
from synthetic_checkpoints import Synthetic, write_synthetic

REQUEST = QuantizeRequest("nvfp4")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_synthetic(tmp_path / "in", Synthetic("deepseek_v4", "deepseek", shards=3))


def refusing_after(monkeypatch: pytest.MonkeyPatch, count: int, error: Exception) -> list[int]:
    """Projections after the first `count` are refused; how many were asked for."""
    real, asked = engine._write, [0]

    def write(*given: Any) -> None:
        asked[0] += 1
        if asked[0] > count:
            raise error
        real(*given)

    monkeypatch.setattr(engine, "_write", write)
    return asked


def content(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


def test_a_refusal_in_a_later_shard_keeps_what_was_written(source: Path, tmp_path: Path) -> None:
    """The same command goes on; before the first shard nothing is kept, and another may begin."""
    quantize_checkpoint(source, tmp_path / "whole", REQUEST)
    out = tmp_path / "out"
    for count, kept in ((1, False), (14, True)):
        with pytest.MonkeyPatch.context() as patch:
            refusing_after(patch, count, Unsupported("planted"))
            with pytest.raises(Unsupported, match="planted"):
                quantize_checkpoint(source, out, REQUEST, workers=1)
        assert (out / WORK).exists() == kept == bool(list(out.glob("*.safetensors")))
    quantize_checkpoint(source, out, REQUEST)
    assert content(out) == content(tmp_path / "whole")


def test_a_refusal_ends_the_shard(source: Path, tmp_path: Path) -> None:
    """The others of it are not rewritten first."""
    stopped, asked = threading.Event(), [0]

    class Pool(ThreadPoolExecutor):
        def shutdown(self, *given: Any, **named: Any) -> None:
            stopped.set()
            super().shutdown(*given, **named)

    def refuse(*given: Any) -> None:
        asked[0] += 1
        if asked[0] > 1:  # the main thread has heard of the first by then
            stopped.wait(5)
            time.sleep(0.05)
        raise Unsupported("planted")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "ThreadPoolExecutor", Pool)
        patch.setattr(engine, "_write", refuse)
        with pytest.raises(Unsupported):
            quantize_checkpoint(source, tmp_path / "out", REQUEST, workers=1)
    assert asked[0] <= 3  # of 8 units of two projections or one


def grow(source: Path) -> None:
    """A shard with another header, at the time of before."""
    file = next(source.glob("*.safetensors"))
    stat = file.stat()
    save_file(load_file(file), file, metadata={"more": "x" * 100})
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def reconfigure(source: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"transformers_version": "9"}))


@pytest.mark.parametrize("change", [grow, reconfigure])
def test_an_input_that_changes_does_not_continue(source: Path, tmp_path: Path, change: Any) -> None:
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        refusing_after(patch, 14, Unsupported("planted"))
        with pytest.raises(Unsupported):
            quantize_checkpoint(source, out, REQUEST, workers=1)
    change(source)
    with pytest.raises(ConfigError, match="or the input has changed since"):
        quantize_checkpoint(source, out, REQUEST)


def test_gate_and_up_in_two_shards(source: Path, tmp_path: Path) -> None:
    """They share a global scale, so both are made for each shard; each writes its own."""
    expected = tmp_path / "expected"
    quantize_checkpoint(source, expected, REQUEST)
    tensors = {n: t for p in source.glob("*.safetensors") for n, t in load_file(p).items()}
    for path in source.glob("*.safetensors*"):
        path.unlink()
    ups = {n: t for n, t in tensors.items() if ".experts." in n and ".w3." in n}
    save_file(ups, source / "b.safetensors")
    save_file({n: t for n, t in tensors.items() if n not in ups}, source / "a.safetensors")
    rows, _ = quantize_checkpoint(source, tmp_path / "out", REQUEST)
    names = [row.name for row in rows]
    assert names == sorted(set(names)) and len(names) == 24
    made, whole = (Checkpoint(folder) for folder in (tmp_path / "out", expected))
    files = {name: info.file for name, info in made.tensors.items()}
    assert all(
        (".w3." in n) == (f == "b.safetensors") for n, f in files.items() if ".experts." in n
    )
    for layer in (0, 1):
        found, asked = read_layer(made, layer), read_layer(whole, layer)
        for name, buffer in asked.bank.named_buffers():  # type: ignore[union-attr]
            assert found.bank.get_buffer(name).equal(buffer), name  # type: ignore[union-attr]


def test_a_stack_is_rewritten_as_a_whole(tmp_path: Path) -> None:
    source = write_synthetic(tmp_path / "in", Synthetic("deepseek_v4", "stacked-mxfp4"))
    checkpoint = Checkpoint(source)
    units = quantizing._plan(checkpoint, REQUEST, MODELOPT_NVFP4).units
    require_whole_stacks(checkpoint, units)
    with pytest.raises(Unsupported, match="down_proj .* is rewritten in part; allowed: all of it"):
        require_whole_stacks(checkpoint, units[:-1])


def test_what_is_not_copied(source: Path, tmp_path: Path) -> None:
    """Other weights, and the words of the input's quantisation."""
    for name in ("hf_quant_config.json", "old.bin", "old.gguf", ".hidden", "x.index.json"):
        (source / name).write_text("{}")
    (source / "merges.txt").write_text("a b")
    quantize_checkpoint(source, tmp_path / "out", REQUEST)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    names = {name for name in names if not name.startswith("model")}
    assert names == {"config.json", "exactmoe_report.json", "merges.txt"}


def test_progress_goes_with_the_work(source: Path, tmp_path: Path) -> None:
    """A step for each unit, of its share of the bytes, and for each tensor that is copied."""
    seen: list[int] = []
    quantize_checkpoint(source, tmp_path / "out", REQUEST, progress=seen.append)
    checkpoint = Checkpoint(source)
    experts = [i for i in checkpoint.tensors.values() if ".experts." in i.name]
    experts = [info for info in experts if "shared" not in info.name]
    copied = Counter(i.nbytes for i in checkpoint.tensors.values() if i not in experts)
    assert not copied - Counter(seen)
    left = sorted((Counter(seen) - copied).elements())
    units = 2 * 4 * 2
    assert len(left) >= units and max(left) < 3 * sum(i.nbytes for i in experts) / units


def test_a_wrong_cast_names_no_shard(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --lossy nothing is quantised instead."""
    monkeypatch.setattr(quantizing, "exact_cast", lambda weight, format: None)
    with pytest.raises(ConfigError, match="have no exact nvfp4 form; allowed without --lossy"):
        quantize_checkpoint(source, tmp_path / "out", REQUEST)
    assert not list((tmp_path / "out").glob("*.safetensors"))
