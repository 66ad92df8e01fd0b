"""Broken and hostile files: each is refused by name, without reading or making what they claim."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_maker import (
    Tensors,
    deepseek_config,
    deepseek_tensors,
    glm_config,
    glm_tensors,
    write,
)
from exactmoe.checkpoint import Checkpoint
from exactmoe.errors import CheckpointError
from fuzz_checkpoints import case, originals

INDEX = "model.safetensors.index.json"
FILE = "model.safetensors"
NORM = "model.language_model.norm.weight"


@pytest.fixture
def tensors(rng: torch.Generator) -> Tensors:
    return glm_tensors(rng)


def edit_header(path: Path, edit: Callable[[dict[str, Any]], None | str]) -> None:
    """Changes the header of model.safetensors; values stay. `edit` may return its text."""
    data = (path / FILE).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    text = edit(header)
    raw = (json.dumps(header) if text is None else text).encode()
    (path / FILE).write_bytes(len(raw).to_bytes(8, "little") + raw + data[8 + length :])


def overlapping(header: dict[str, Any]) -> None:
    names = sorted(
        (n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"]
    )
    header[names[1]]["data_offsets"] = header[names[0]]["data_offsets"]


def wrong_dtype(header: dict[str, Any]) -> None:
    header[NORM]["dtype"] = "F64"


def unknown_dtype(header: dict[str, Any]) -> None:
    header[NORM]["dtype"] = "F128"


def wrong_shape(header: dict[str, Any]) -> None:
    header[NORM]["shape"] = [2**40]


def overflowing_shape(header: dict[str, Any]) -> None:
    header[NORM]["shape"] = [2**33, 2**33]


def negative_shape(header: dict[str, Any]) -> None:
    header[NORM]["shape"] = [-64]


def no_offsets(header: dict[str, Any]) -> None:
    del header[NORM]["data_offsets"]


@pytest.mark.parametrize(
    "edit",
    [
        overlapping,
        wrong_dtype,
        unknown_dtype,
        wrong_shape,
        overflowing_shape,
        negative_shape,
        no_offsets,
    ],
)
def test_header_that_does_not_fit_its_values(
    tmp_path: Path, tensors: Tensors, edit: Callable[[dict[str, Any]], None]
) -> None:
    edit_header(write(tmp_path, glm_config(), tensors), edit)
    with pytest.raises(CheckpointError, match=f"{FILE} cannot be read"):
        Checkpoint(tmp_path)


def test_a_dtype_that_nothing_here_reads(tmp_path: Path, tensors: Tensors) -> None:
    """safetensors knows it, and its bytes fit."""

    def as_fp4(header: dict[str, Any]) -> None:
        begin, end = header[NORM]["data_offsets"]
        header[NORM] |= {"dtype": "F4", "shape": [2 * (end - begin)]}

    edit_header(write(tmp_path, glm_config(), tensors), as_fp4)
    with pytest.raises(CheckpointError, match=f"{NORM} has dtype F4; known: BOOL, U8"):
        Checkpoint(tmp_path)


def test_name_twice_in_a_header(tmp_path: Path, tensors: Tensors) -> None:
    def twice(header: dict[str, Any]) -> str:
        text = json.dumps(header)
        entry = f'"{NORM}": {json.dumps(header[NORM])}'
        assert entry in text
        return text.replace(entry, f"{entry}, {entry}")

    edit_header(write(tmp_path, glm_config(), tensors), twice)
    with pytest.raises(CheckpointError, match=f"'{NORM}' appears twice in one object"):
        Checkpoint(tmp_path)


def test_absurd_shape_without_values(tmp_path: Path, tensors: Tensors) -> None:
    """Nothing of it is in the file, so safetensors lets it pass; torch could not hold its sizes."""

    def add(header: dict[str, Any]) -> None:
        end = max(e["data_offsets"][1] for n, e in header.items() if n != "__metadata__")
        header["model.visual.x"] = {
            "dtype": "BF16",
            "shape": [2**40, 0, 2**40],
            "data_offsets": [end, end],
        }

    edit_header(write(tmp_path, glm_config(), tensors), add)
    with pytest.raises(CheckpointError, match=r"model.visual.x has shape .*at most 2\^62 values"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    "file", ["../outside.safetensors", "/etc/hostname", "a/b.safetensors", "..", "", "a\0b", 7]
)
def test_index_pointing_outside(tmp_path: Path, tensors: Tensors, file: Any) -> None:
    write(tmp_path / "in", glm_config(), tensors, shards=2)
    write(tmp_path, glm_config(), {NORM: tensors[NORM]})
    (tmp_path / FILE).rename(tmp_path / "outside.safetensors")
    index = json.loads((tmp_path / "in" / INDEX).read_text())
    index["weight_map"][NORM] = file
    (tmp_path / "in" / INDEX).write_text(json.dumps(index))
    with pytest.raises(
        CheckpointError, match=f"puts {NORM} into .*; allowed: a file of the folder"
    ):
        Checkpoint(tmp_path / "in")


def test_links_of_the_hub_cache_are_followed(tmp_path: Path, tensors: Tensors) -> None:
    write(tmp_path / "blobs", glm_config(), tensors, shards=2)
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in (tmp_path / "blobs").iterdir():
        (snapshot / path.name).symlink_to(path)
    assert set(Checkpoint(snapshot).tensors) == set(tensors)


@pytest.mark.parametrize("name", ["config.json", FILE])
def test_a_pipe_is_not_waited_for(tmp_path: Path, tensors: Tensors, name: str) -> None:
    write(tmp_path, glm_config(), tensors, shards=1)
    index = json.loads((tmp_path / INDEX).read_text())
    (tmp_path / INDEX).write_text(
        json.dumps({"weight_map": dict.fromkeys(index["weight_map"], FILE)})
    )
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match=f"{name} is no regular file"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_nested_too_deeply(tmp_path: Path, tensors: Tensors, name: str) -> None:
    write(tmp_path, glm_config(), tensors, shards=2)
    (tmp_path / name).write_text('{"a":' * 100_000)
    with pytest.raises(CheckpointError, match=f"{name} cannot be read"):
        Checkpoint(tmp_path)


def test_a_huge_json_is_not_read(tmp_path: Path, tensors: Tensors) -> None:
    write(tmp_path, glm_config(), tensors)
    os.truncate(tmp_path / "config.json", 10**12)
    with pytest.raises(CheckpointError, match=r"config.json has 1000000000000 bytes; allowed"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**12, "num_hash_layers": 0}, "num_hidden_layers is 1000000000000"),
        ({"n_routed_experts": 10**12}, "n_routed_experts is 1000000000000"),
        ({"num_nextn_predict_layers": 10**300}, "num_nextn_predict_layers is 10000"),
        ({"model_type": ["deepseek_v4"]}, "model_type is .*allowed: a string"),
        ({"text_config": [1]}, "text_config is .*allowed: an object"),
        ({"swiglu_limit": 10**400}, "int too large"),
    ],
)
def test_absurd_configs(
    tmp_path: Path, rng: torch.Generator, changes: dict[str, Any], message: str
) -> None:
    config = deepseek_config(**changes)
    if "num_hash_layers" in changes:
        del config["mlp_layer_types"]
    write(tmp_path, config, deepseek_tensors(rng))
    with pytest.raises(CheckpointError, match=rf"config.json: {message}"):
        Checkpoint(tmp_path)


def test_broken_at_random(tmp_path: Path) -> None:
    """The first cases of the fuzzer (tests/helpers/fuzz_checkpoints.py runs on for as long)."""
    sound = originals(tmp_path)
    findings = [case(seed, sound, tmp_path) for seed in range(400)]
    assert [finding for finding in findings if finding is not None] == []
