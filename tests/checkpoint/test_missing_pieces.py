"""Field fault A28 for the further layouts: what is missing, extra or malformed is named."""

from pathlib import Path

import pytest
import torch

from checkpoint_layouts import LAYOUTS, projections, same_bytes
from checkpoint_maker import Tensors, write
from exactmoe.checkpoint import Checkpoint, audit, read_moe
from exactmoe.errors import CheckpointError

SECOND = "model-00002-of-00003.safetensors"


def _experts(tensors: Tensors) -> list[str]:
    """A name for every part of every projection; of expert 1 where experts are apart."""
    return [
        name
        for name in sorted(tensors)
        if ".1." in name.partition(".experts")[0] and "input" not in name
        if ".experts.1." in name or ".experts.gate_up" in name or ".experts.down" in name
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_folder_gives_the_same_bytes(
    tmp_path: Path, rng: torch.Generator, layout: str
) -> None:
    config, tensors = LAYOUTS[layout](rng)
    folders = [write(tmp_path / f"{shards}", config, tensors, shards) for shards in (0, 3)]
    folders.append(write(tmp_path / "no index", config, tensors, 3))
    (folders[-1] / "model.safetensors.index.json").unlink()
    loaded = []
    for folder in folders:
        checkpoint = Checkpoint(folder)
        report = audit(checkpoint)
        report.require_clean()
        named = [entry.info.name for entry in (*report.consumed, *report.ignored)]
        assert sorted(named) == sorted(tensors)
        read: list[int] = []
        weights = projections(read_moe(checkpoint, 1, read.append))
        loaded.append(weights)
        assert sum(read) == sum(e.info.nbytes for e in report.consumed if e.layer == 1)
    for other in loaded[1:]:
        for name, weight in other.items():
            assert same_bytes(weight.codes, loaded[0][name].codes)
            for part in ("scales", "global_scale"):
                found, first = getattr(weight, part), getattr(loaded[0][name], part)
                assert (found is None and first is None) or same_bytes(found, first)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shard_deleted(tmp_path: Path, rng: torch.Generator, layout: str) -> None:
    path = write(tmp_path, *LAYOUTS[layout](rng), shards=3)
    (path / SECOND).unlink()
    with pytest.raises(CheckpointError, match=f"{SECOND} is missing"):
        Checkpoint(path)
    (path / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=f"{SECOND} is missing"):
        Checkpoint(path)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensor_deleted(tmp_path: Path, rng: torch.Generator, layout: str) -> None:
    config, tensors = LAYOUTS[layout](rng)
    names = _experts(tensors)
    assert len(names) >= 2
    for number, name in enumerate(names):
        fewer = {n: t for n, t in tensors.items() if n != name}
        checkpoint = Checkpoint(write(tmp_path / str(number), config, fewer))
        report = audit(checkpoint)
        missing = [finding for finding in report.errors if finding.info is None]
        if layout == "stacked BF16":
            # Nothing is left that says the experts were stacked: each of them is missing.
            assert len(missing) == (8 if "gate_up" in name else 4)
        else:
            assert [finding.tensor for finding in missing] == [name]
        with pytest.raises(CheckpointError, match="is missing"):
            read_moe(checkpoint, 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_wrong_shape(tmp_path: Path, rng: torch.Generator, layout: str) -> None:
    config, tensors = LAYOUTS[layout](rng)
    for number, name in enumerate(_experts(tensors)):
        right = tensors[name]
        raw = right.view(torch.uint8) if right.element_size() == 1 else right
        wrong = torch.cat([raw, raw], -1) if raw.ndim else torch.stack([raw, raw])
        if raw.ndim == 0 or raw.shape == (1,):
            wrong = torch.ones(2)
        changed = tensors | {name: wrong.view(right.dtype)}
        checkpoint = Checkpoint(write(tmp_path / str(number), config, changed))
        with pytest.raises(CheckpointError, match=rf"model\.safetensors: {name} .*: expected "):
            read_moe(checkpoint, 1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("extra", ["bias", "4.w1.weight", "gate_up_proj_bias", "down_proj.weight"])
def test_extra_tensor(tmp_path: Path, rng: torch.Generator, layout: str, extra: str) -> None:
    config, tensors = LAYOUTS[layout](rng)
    block = _experts(tensors)[0].partition(".experts.")[0]
    name = f"{block}.experts.{extra}"
    checkpoint = Checkpoint(write(tmp_path, config, tensors | {name: torch.zeros(2, 2)}))
    expected = rf"{name} .F32 \[2, 2\]. is unexpected"
    with pytest.raises(CheckpointError, match=expected):
        audit(checkpoint).require_clean()
    with pytest.raises(CheckpointError, match=expected):
        read_moe(checkpoint, 1)


def test_stacked_beside_single_tensors(tmp_path: Path, rng: torch.Generator) -> None:
    """Two claims to one projection: the stacked one is unexpected, not silently preferred."""
    config, tensors = LAYOUTS["stacked NVFP4"](rng)
    name = "model.language_model.layers.1.mlp.experts.2.up_proj.weight"
    checkpoint = Checkpoint(write(tmp_path, config, tensors | {name: torch.zeros(32, 32).byte()}))
    messages = [finding.message for finding in audit(checkpoint).errors]
    assert any("experts.gate_up_proj (U8 [4, 64, 32]) is unexpected" in text for text in messages)
    with pytest.raises(CheckpointError):
        read_moe(checkpoint, 1)
