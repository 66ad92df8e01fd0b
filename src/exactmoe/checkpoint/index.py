"""What a checkpoint folder holds: its config, and every tensor's file, dtype, shape and bytes.

The index is the authority; a folder without one is its only file, or all of its files together.
Headers are read through safetensors, values are not read here.
"""

import itertools
import json
import os
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from exactmoe.config import Numerics
from exactmoe.errors import CheckpointError, ConfigError, Unsupported
from exactmoe.families import Family, family_of

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

# The longest header that safetensors reads (MAX_HEADER_SIZE in its tensor.rs).
_MAX_HEADER = 100_000_000
# Bits of a safetensors dtype; the names are those of its headers.
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I16": 16, "U16": 16,
    "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
}  # fmt: skip


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint, from a file's header.

    Attributes:
        name: full name.
        file: name of its file inside the folder.
        dtype: as safetensors spells it ("U8", "F8_E4M3", "BF16", ...).
        shape: () for a scalar.
        nbytes: of its values.
    """

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    def __str__(self) -> str:
        return f"{self.file}: {self.name} ({self.dtype} {list(self.shape)})"


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
        CheckpointError: a file is missing or unreadable, or index and files disagree.
        ConfigError, Unsupported: config.json describes a model that cannot run here, or `numerics`
            is not allowed.
    """

    def __init__(self, path: str | Path, numerics: Numerics | str | None = None) -> None:
        if numerics is not None:
            # Here, so that config.json is not blamed for the caller's value.
            numerics = Numerics.of(numerics)
        self.path = Path(path)
        _require_folder(self.path)
        self.config = _read_json(self.path / "config.json")
        self.tensors = _read_tensors(self.path)
        try:
            self.family: Family = family_of(self.config, self.tensors, numerics)
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


def _require_folder(path: Path) -> None:
    if not path.is_dir():
        what = "a file" if path.exists() else "not a folder"
        raise CheckpointError(f"{path} is {what}; allowed: a checkpoint folder")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_no_duplicates)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}; allowed: an object")
    return content


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} appears twice in one object")
    return content


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
    weight_map = _read_json(path / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path / INDEX} has no weight_map")
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


def read_header(path: Path, file: str) -> list[TensorInfo]:
    """Every tensor of one safetensors file of the folder `path`; no values are read."""
    try:
        with safe_open(path / file, framework="pt") as handle:
            slices = [(name, handle.get_slice(name)) for name in handle.keys()]  # noqa: SIM118
            headers = [(name, s.get_dtype(), tuple(s.get_shape())) for name, s in slices]
    except FileNotFoundError as error:
        raise CheckpointError(f"{path / file} is missing") from error
    except (OSError, SafetensorError) as error:
        reason = _truncation(path / file) or error
        raise CheckpointError(f"{path / file} cannot be read: {reason}") from error
    return [
        TensorInfo(name, file, dtype, shape, _nbytes(path / file, name, dtype, shape))
        for name, dtype, shape in headers
    ]


def _truncation(file: Path) -> str | None:
    """Bytes found and asked for where a file that safetensors refused is too short, else None.

    Layout (safetensors' README, "Format"): u64 N, little-endian; N bytes of JSON; the values, whose
    offsets count from the end of the JSON.
    """
    try:
        with file.open("rb") as handle:
            size = handle.seek(0, os.SEEK_END)
            handle.seek(0)
            asked = 8 + int.from_bytes(handle.read(8), "little")
            if size < 8 or asked > 8 + _MAX_HEADER:
                return None
            if size >= asked:
                entries = json.loads(handle.read(asked - 8))
                ends = [e["data_offsets"][1] for n, e in entries.items() if n != "__metadata__"]
                asked += max(ends, default=0)
    except (OSError, ValueError, AttributeError, LookupError, TypeError):
        return None  # not a safetensors file: safetensors' own words stand
    if size >= asked:
        return None
    return (
        f"it is truncated: {size} bytes are there, its header asks for {asked}; copy the file again"
    )


def _nbytes(file: Path, name: str, dtype: str, shape: tuple[int, ...]) -> int:
    if dtype not in BITS:
        raise CheckpointError(f"{file}: {name} has dtype {dtype}; known: {', '.join(BITS)}")
    values = 1
    for size in shape:
        values *= size
    return values * BITS[dtype] // 8


def _group(infos: Iterable[TensorInfo]) -> dict[str, dict[str, TensorInfo]]:
    groups: dict[str, dict[str, TensorInfo]] = {}
    for info in infos:
        base, _, leaf = info.name.rpartition(".")
        groups.setdefault(base, {})[leaf] = info
    return groups
