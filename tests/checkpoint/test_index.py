"""Opening a folder: what is missing, unreadable or contradictory is named."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint_maker import (
    Tensors,
    deepseek_config,
    deepseek_tensors,
    glm_config,
    glm_tensors,
    write,
)
from exactmoe.checkpoint import Checkpoint
from exactmoe.errors import CheckpointError, ConfigError, Unsupported
from exactmoe.load import load_layer

INDEX = "model.safetensors.index.json"
SECOND = "model-00002-of-00003.safetensors"
NORM = "model.language_model.norm.weight"


@pytest.fixture
def tensors(rng: torch.Generator) -> Tensors:
    return glm_tensors(rng)


def _edit_index(path: Path, name: str, file: str | None) -> None:
    index = json.loads((path / INDEX).read_text())
    index["weight_map"].pop(name, None)
    if file is not None:
        index["weight_map"][name] = file
    (path / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize("shards", [0, 1, 3])
def test_every_tensor_with_its_header(tmp_path: Path, tensors: Tensors, shards: int) -> None:
    checkpoint = Checkpoint(write(tmp_path, glm_config(), tensors, shards))
    assert set(checkpoint.tensors) == set(tensors)
    names = {torch.uint8: "U8", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3"}
    for name, tensor in tensors.items():
        info = checkpoint.tensors[name]
        assert (info.name, info.shape) == (name, tuple(tensor.shape))
        assert info.nbytes == tensor.numel() * tensor.element_size()
        assert info.dtype == names.get(tensor.dtype, "F32")
        assert name in load_file(tmp_path / info.file)
    assert checkpoint.nbytes == sum(info.nbytes for info in checkpoint.tensors.values())


def test_native_dtypes(tmp_path: Path, rng: torch.Generator) -> None:
    checkpoint = Checkpoint(write(tmp_path, deepseek_config(), deepseek_tensors(rng)))
    leaves = checkpoint.leaves("layers.0.ffn.experts.0.w1")
    assert {leaf: info.dtype for leaf, info in leaves.items()} == {
        "weight": "I8",
        "scale": "F8_E8M0",
    }
    assert checkpoint.tensors["layers.0.ffn.gate.tid2eid"].dtype == "I64"


def test_several_files_without_an_index(tmp_path: Path, tensors: Tensors) -> None:
    write(tmp_path, glm_config(), tensors, shards=3)
    (tmp_path / INDEX).unlink()
    assert set(Checkpoint(tmp_path).tensors) == set(tensors)
    (tmp_path / SECOND).unlink()
    with pytest.raises(CheckpointError, match=f"{SECOND} is missing: .* counts 00003"):
        Checkpoint(tmp_path)


def test_shard_missing(tmp_path: Path, tensors: Tensors) -> None:
    write(tmp_path, glm_config(), tensors, shards=3)
    (tmp_path / SECOND).unlink()
    with pytest.raises(CheckpointError, match=f"{SECOND} is missing"):
        Checkpoint(tmp_path)


def test_tensor_in_the_index_but_not_in_the_file(tmp_path: Path, tensors: Tensors) -> None:
    write(tmp_path, glm_config(), tensors, shards=3)
    _edit_index(tmp_path, "model.extra", SECOND)
    with pytest.raises(CheckpointError, match=f"model.extra is not in .*{SECOND}"):
        Checkpoint(tmp_path)


def test_tensor_in_a_file_but_not_in_the_index(tmp_path: Path, tensors: Tensors) -> None:
    write(tmp_path, glm_config(), tensors, shards=3)
    _edit_index(tmp_path, NORM, None)
    with pytest.raises(CheckpointError, match=f"holds {NORM}, but {INDEX} does not name it"):
        Checkpoint(tmp_path)


def test_tensor_in_two_files(tmp_path: Path, tensors: Tensors) -> None:
    write(tmp_path, glm_config(), tensors, shards=3)
    second = load_file(tmp_path / SECOND)
    name = next(iter(second))
    first = "model-00001-of-00003.safetensors"
    save_file(load_file(tmp_path / first) | {name: second[name]}, tmp_path / first)
    with pytest.raises(
        CheckpointError, match=f"{first} holds {name}, but .* puts it into {SECOND}"
    ):
        Checkpoint(tmp_path)
    (tmp_path / INDEX).unlink()
    with pytest.raises(CheckpointError, match=f"{name} is in {first} and in {SECOND}"):
        Checkpoint(tmp_path)


def test_name_twice_in_the_index(tmp_path: Path, tensors: Tensors) -> None:
    write(tmp_path, glm_config(), tensors, shards=3)
    text = (tmp_path / INDEX).read_text()
    entry = f'"{NORM}": '
    (tmp_path / INDEX).write_text(text.replace(entry, f'{entry}"{SECOND}", {entry}'))
    with pytest.raises(CheckpointError, match=f"{INDEX} cannot be read: '{NORM}' appears twice"):
        Checkpoint(tmp_path)


def test_two_checkpoints_in_one_folder(tmp_path: Path, tensors: Tensors) -> None:
    write(tmp_path, glm_config(), tensors, shards=3)
    write(tmp_path, glm_config(), tensors)
    with pytest.raises(CheckpointError, match="two checkpoints in one folder"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("content", [b"", b"not a safetensors file", b"\xff" * 64])
def test_unreadable_header(tmp_path: Path, tensors: Tensors, content: bytes) -> None:
    write(tmp_path, glm_config(), tensors, shards=3)
    (tmp_path / SECOND).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{SECOND} cannot be read"):
        Checkpoint(tmp_path)


def test_truncated_file(tmp_path: Path, tensors: Tensors) -> None:
    file = write(tmp_path, glm_config(), tensors) / "model.safetensors"
    whole = file.read_bytes()
    header = int.from_bytes(whole[:8], "little") + 8
    for size, asked in ((len(whole) - 1, len(whole)), (header, len(whole)), (header - 1, header)):
        file.write_bytes(whole[:size])
        with pytest.raises(
            CheckpointError,
            match=f"model.safetensors cannot be read: it is truncated: {size} bytes are there, "
            f"its header asks for {asked}; copy the file again",
        ):
            Checkpoint(tmp_path)


def test_longer_than_its_header_says(tmp_path: Path, tensors: Tensors) -> None:
    file = write(tmp_path, glm_config(), tensors) / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"0")
    with pytest.raises(CheckpointError, match="model.safetensors cannot be read") as caught:
        Checkpoint(tmp_path)
    assert "truncated" not in str(caught.value)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nope is not a folder; allowed: a checkpoint folder"):
        Checkpoint(tmp_path / "nope")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file is a file; allowed: a checkpoint folder"):
        Checkpoint(str(tmp_path / "file"))


def test_numerics_of_the_caller_are_not_blamed_on_a_file(tmp_path: Path, tensors: Tensors) -> None:
    write(tmp_path, glm_config(), tensors)
    with pytest.raises(ConfigError, match="^numerics is 'a17'; allowed: a16, a8"):
        Checkpoint(tmp_path, "a17")


def test_config_and_files_missing(tmp_path: Path, tensors: Tensors) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        Checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(glm_config()))
    with pytest.raises(CheckpointError, match="no other safetensors file"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_config_is_not_an_object(tmp_path: Path, tensors: Tensors, text: str) -> None:
    write(tmp_path, glm_config(), tensors)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Checkpoint(tmp_path)


def test_config_errors_name_the_file(tmp_path: Path, tensors: Tensors) -> None:
    write(tmp_path, glm_config(n_group=8, topk_group=4), tensors)
    with pytest.raises(Unsupported, match=r"config\.json: n_group is 8") as caught:
        Checkpoint(tmp_path)
    assert "n_group is 8" in caught.value.reason


@pytest.mark.parametrize("content", [{}, {"weight_map": {}}, {"weight_map": ["a"]}])
def test_an_index_without_names(tmp_path: Path, tensors: Tensors, content: object) -> None:
    write(tmp_path, glm_config(), tensors, shards=2)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="index.json has no weight_map"):
        Checkpoint(tmp_path)


def test_tensors_come_in_the_order_of_the_file(tmp_path: Path, tensors: Tensors) -> None:
    """Whatever the order of its header."""
    path = write(tmp_path, glm_config(), tensors) / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    text = json.dumps(dict(sorted(header.items(), reverse=True))).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    offsets = [info.offset for info in Checkpoint(tmp_path).tensors.values()]
    assert offsets == sorted(offsets) and len(offsets) == len(tensors)


def test_the_empty_text_is_not_the_current_folder(
    tmp_path: Path, tensors: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable that nobody set must not open what happens to lie here."""
    monkeypatch.chdir(write(tmp_path, glm_config(), tensors))
    assert len(Checkpoint(".").tensors) == len(tensors)
    said = "path is '', the empty text; allowed: a checkpoint folder"
    with pytest.raises(CheckpointError, match=said):
        Checkpoint("")
    with pytest.raises(CheckpointError, match=said):
        load_layer("", 1)
