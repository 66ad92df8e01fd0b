"""Progress of quantize and convert: every byte of the input once, whatever the shards hold."""

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from exactmoe.checkpoint import Checkpoint
from exactmoe.checkpoint.rewrite import QuantizeRequest, engine, quantize_checkpoint
from synthetic_checkpoints import Synthetic, write_synthetic


@pytest.mark.parametrize("shards", [1, 3])
def test_all_bytes_are_counted(tmp_path: Path, shards: int) -> None:
    synthetic = Synthetic("deepseek_v4", "bf16", num_experts=5, shards=shards)
    source = write_synthetic(tmp_path / "in", synthetic)
    seen: list[int] = []
    request = QuantizeRequest("nvfp4", lossy=True)
    quantize_checkpoint(source, tmp_path / "out", request, progress=seen.append)
    assert sum(seen) == Checkpoint(source).nbytes
    assert all(count >= 0 for count in seen)


def scales_apart(source: Path) -> Path:
    """One file of codes and all else, one whose tensors are all replaced: the scales of experts."""
    (file,) = source.glob("*.safetensors")
    tensors = load_file(file)
    apart = {n: t for n, t in tensors.items() if ".experts." in n and n.endswith(".scale")}
    apart = {n: t for n, t in apart.items() if "shared" not in n}
    assert apart
    save_file(apart, source / "b.safetensors")
    save_file({n: t for n, t in tensors.items() if n not in apart}, source / "a.safetensors")
    file.unlink()
    (source / "model.safetensors.index.json").unlink()
    return source


def test_a_file_of_which_nothing_is_left(tmp_path: Path) -> None:
    """Its bytes are done with as well, and the output has no such file."""
    synthetic = Synthetic("deepseek_v4", "deepseek", shards=1)
    source = scales_apart(write_synthetic(tmp_path / "in", synthetic))
    seen: list[int] = []
    out = tmp_path / "out"
    quantize_checkpoint(source, out, QuantizeRequest("nvfp4"), progress=seen.append)
    assert sum(seen) == Checkpoint(source).nbytes
    assert [path.name for path in out.glob("*.safetensors")] == ["a.safetensors"]


def test_a_run_that_continues_counts_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_synthetic(tmp_path / "in", Synthetic("deepseek_v4", "deepseek", shards=3))
    seen: list[int] = []
    arguments = source, tmp_path / "out", QuantizeRequest("nvfp4")

    def stopped(*given: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_finish", stopped)
        with pytest.raises(KeyboardInterrupt):
            quantize_checkpoint(*arguments)
    quantize_checkpoint(*arguments, progress=seen.append)
    shards = {info.file: 0 for info in Checkpoint(source).tensors.values()}
    for info in Checkpoint(source).tensors.values():
        shards[info.file] += info.nbytes
    assert seen == list(shards.values())
