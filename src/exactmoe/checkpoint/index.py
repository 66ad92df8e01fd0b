"""What a checkpoint folder holds: its config, and every tensor's file, dtype, shape and bytes.

The index is the authority; a folder without one is its only file, or all of its files together.
Values are not read here.
"""

import itertools
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from exactmoe.checkpoint.header import TensorInfo, read_header, read_json
from exactmoe.config import Numerics
from exactmoe.errors import CheckpointError, ConfigError, Unsupported
from exactmoe.families import Family, family_of

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

# Fields of config.json that count layers or experts.
_COUNTED = (
    "num_hidden_layers",
    "num_nextn_predict_layers",
    "n_routed_experts",
    "num_local_experts",
    "num_experts",
)


class Checkpoint:
    """A folder with config.json and safetensors files, opened but not read.

    Args:
        path: the folder.
        numerics: None: the family's class.

    Attributes:
        path: the folder.
        config: config.json.
        family: layer specs, names and ignore rules.
        tensors: name -> TensorInfo, in the order of the files.

    Raises:
        CheckpointError: a file is missing or unreadable, index and files disagree, or `path` is "".
        ConfigError, Unsupported: config.json describes a model that cannot run here, or `numerics`
            is not allowed.
    """

    def __init__(self, path: str | Path, numerics: Numerics | str | None = None) -> None:
        if numerics is not None:
            # Here, so that config.json is not blamed for the caller's value.
            numerics = Numerics.of(numerics)
        self.path = _folder(path)
        self.config = read_json(self.path / "config.json")
        self.tensors = _read_tensors(self.path)
        _require_plausible(self.path / "config.json", self.config, self.tensors.values())
        try:
            self.family: Family = family_of(self.config, self.tensors, numerics)
        except OverflowError as error:
            raise CheckpointError(f"{self.path / 'config.json'}: {error}") from error
        except (ConfigError, Unsupported, CheckpointError) as error:
            raise type(error)(f"{self.path / 'config.json'}: {error}") from error
        self._leaves = _group(self.tensors.values())
        self._sorted_names = sorted(self.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for info in self.tensors.values())

    def leaves(self, base: str) -> Mapping[str, TensorInfo]:
        """The tensors called `base` + "." + one more word, by that word."""
        return self._leaves.get(base, {})

    def names_under(self, prefix: str) -> list[str]:
        """Names of all tensors that start with `prefix`, sorted."""
        start = bisect_left(self._sorted_names, prefix)
        names = itertools.islice(self._sorted_names, start, None)
        return list(itertools.takewhile(lambda name: name.startswith(prefix), names))


def _folder(given: str | Path) -> Path:
    if given == "":  # Path would take the current folder for it
        raise CheckpointError("path is '', the empty text; allowed: a checkpoint folder")
    path = Path(given)
    if not path.is_dir():
        what = "a file" if path.exists() else "not a folder"
        raise CheckpointError(f"{path} is {what}; allowed: a checkpoint folder")
    return path


def _require_plausible(path: Path, config: dict[str, Any], infos: Iterable[TensorInfo]) -> None:
    """Refuses what would cost time and memory before any check of names and shapes."""
    if not isinstance(config.get("model_type"), str | None):
        raise CheckpointError(f"{path}: model_type is {config['model_type']!r}; allowed: a string")
    text = config.get("text_config")
    if not isinstance(text, dict | None):
        raise CheckpointError(f"{path}: text_config is {text!r:.100}; allowed: an object")
    infos = list(infos)
    # Each layer has a tensor of its own; each expert too, or a row of a stacked one.
    most = max([len(infos), *(info.shape[0] for info in infos if info.shape and info.nbytes)])
    for part in (config, text or {}):
        for name in _COUNTED:
            if isinstance(value := part.get(name), int) and value > most:
                raise CheckpointError(
                    f"{path}: {name} is {value!r:.40}, but the files have {len(infos)} tensors and "
                    f"no dimension above {most}"
                )


def _read_tensors(path: Path) -> dict[str, TensorInfo]:
    if (path / INDEX).is_file():
        return _read_indexed(path)
    files = [SINGLE] if (path / SINGLE).is_file() else _files_without_index(path)
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for info in read_header(path, file):
            if info.name in tensors:
                raise CheckpointError(f"{info.name} is in {tensors[info.name].file} and in {file}")
            tensors[info.name] = info
    return tensors


def _files_without_index(path: Path) -> list[str]:
    files = sorted(file.name for file in path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{path} has no {INDEX}, no {SINGLE} and no other safetensors file")
    for file in files:
        if match := re.fullmatch(r"(.+-)(\d+)-of-(\d+)\.safetensors", file):
            stem, number, count = match.groups()
            for shard in range(1, int(count) + 1):
                name = f"{stem}{shard:0{len(number)}}-of-{count}.safetensors"
                if name not in files:
                    raise CheckpointError(f"{path / name} is missing: {file} counts {count}")
    return files


def _read_indexed(path: Path) -> dict[str, TensorInfo]:
    weight_map = read_json(path / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path / INDEX} has no weight_map")
    for name, file in weight_map.items():
        # safetensors follows any path; links inside the folder, as the hub's cache has, are fine.
        if (
            not isinstance(file, str)
            or file != Path(file).name
            or "\0" in file
            or file in ("", "..")
        ):
            raise CheckpointError(
                f"{path / INDEX} puts {name} into {file!r:.200}; allowed: a file of the folder"
            )
    files = list(dict.fromkeys(weight_map.values()))
    if (path / SINGLE).is_file() and SINGLE not in files:
        raise CheckpointError(
            f"{path} has {SINGLE} and an {INDEX} that does not name it: "
            "two checkpoints in one folder"
        )
    found: dict[str, TensorInfo] = {}
    for file in files:
        for info in read_header(path, file):
            if weight_map.get(info.name) != file:
                says = (
                    f"puts it into {weight_map[info.name]}"
                    if info.name in weight_map
                    else "does not name it"
                )
                raise CheckpointError(f"{path / file} holds {info.name}, but {INDEX} {says}")
            found[info.name] = info
    for name, file in weight_map.items():
        if name not in found:
            raise CheckpointError(f"{name} is not in {path / file}, where {INDEX} puts it")
    return found


def _group(infos: Iterable[TensorInfo]) -> dict[str, dict[str, TensorInfo]]:
    groups: dict[str, dict[str, TensorInfo]] = {}
    for info in infos:
        base, _, leaf = info.name.rpartition(".")
        groups.setdefault(base, {})[leaf] = info
    return groups
