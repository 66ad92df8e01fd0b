"""Headers of safetensors files: every tensor's dtype, shape and place, checked before it is read.

Layout (safetensors' README, "Format"): u64 N, little-endian; N bytes of JSON; the values, whose
offsets count from the end of the JSON. safetensors itself proves that offsets leave no gap, do not
overlap, end with the file and fit dtypes and shapes; here is what it lets pass.
"""

import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from exactmoe.errors import CheckpointError

# The longest header that safetensors reads (MAX_HEADER_SIZE in its tensor.rs).
_MAX_HEADER = 100_000_000
# An index of a million tensors is shorter.
_MAX_JSON = 200_000_000
# Bits of a safetensors dtype; the names are those of its headers.
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I16": 16, "U16": 16,
    "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
}  # fmt: skip
# torch keeps sizes and their products in int64.
_MAX_SIZE = 2**62


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint, from a file's header.

    Attributes:
        name: full name.
        file: name of its file inside the folder.
        dtype: as safetensors spells it ("U8", "F8_E4M3", "BF16", ...).
        shape: () for a scalar.
        nbytes: of its values.
        offset: of its first byte in the file.
    """

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    offset: int

    def __str__(self) -> str:
        return f"{self.file}: {self.name} ({self.dtype} {list(self.shape)})"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; CheckpointError names what is wrong with it."""
    try:
        _require_file(path)
        if path.stat().st_size > _MAX_JSON:
            raise CheckpointError(
                f"{path} has {path.stat().st_size} bytes; allowed: at most {_MAX_JSON}"
            )
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_no_duplicates)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}; allowed: an object")
    return content


def _require_file(path: Path) -> None:
    """Opening a pipe would wait for ever."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise CheckpointError(f"{path} is no regular file")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"{twice!r} appears twice in one object")
    return content


def read_header(path: Path, file: str) -> list[TensorInfo]:
    """Every tensor of one safetensors file of the folder `path`, by offset; no values are read.

    Raises:
        CheckpointError: the file is missing, truncated or malformed, holds a name twice, or has a
            dtype or a shape that nothing here can read.
    """
    try:
        _require_file(path / file)
        with safe_open(path / file, framework="pt"):
            pass  # safetensors' own checks
        with (path / file).open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            entries = json.loads(handle.read(length), object_pairs_hook=_no_duplicates)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path / file} is missing") from error
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        reason = _truncation(path / file) or error
        raise CheckpointError(f"{path / file} cannot be read: {reason}") from error
    infos = [
        _info(path, file, name, entry, 8 + length)
        for name, entry in entries.items()
        if name != "__metadata__"
    ]
    return sorted(infos, key=lambda info: info.offset)


def _info(path: Path, file: str, name: str, entry: dict[str, Any], values: int) -> TensorInfo:
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    if dtype not in BITS:
        raise CheckpointError(f"{path / file}: {name} has dtype {dtype}; known: {', '.join(BITS)}")
    size = 1
    for dimension in shape:
        # A dimension of 0 makes any other one fit the file.
        size *= max(dimension, 1)
    if size > _MAX_SIZE:
        raise CheckpointError(
            f"{path / file}: {name} has shape {list(shape)}; allowed: at most 2^62 values"
        )
    begin, end = entry["data_offsets"]
    return TensorInfo(name, file, dtype, shape, end - begin, values + begin)


def _truncation(file: Path) -> str | None:
    """Bytes found and asked for where a file that safetensors refused is too short, else None."""
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
            if size >= asked:
                return None
    except (OSError, ValueError, AttributeError, LookupError, TypeError, RecursionError):
        return None  # not a safetensors file: safetensors' own words stand
    return (
        f"it is truncated: {size} bytes are there, its header asks for {asked}; copy the file again"
    )
