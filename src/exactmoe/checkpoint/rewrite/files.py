"""Weights out of the files of an input, and shards that are written in any order by any thread."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from exactmoe.checkpoint.dialects import Dialect
from exactmoe.checkpoint.files import Files
from exactmoe.checkpoint.header import BITS, TensorInfo
from exactmoe.checkpoint.plan import Source
from exactmoe.checkpoint.values import converted
from exactmoe.errors import CheckpointError, ConfigError, Unsupported
from exactmoe.formats import PackedWeight

PARTIAL = ".partial"


def output_folder(name: str, given: str | Path) -> Path:
    """The folder of an output, which need not be there; `name` is the argument's.

    Raises:
        ConfigError: the empty text, which Path would take for the current folder.
    """
    if given == "":
        raise ConfigError(f"{name} is '', the empty text; allowed: a folder")
    return Path(given)


class RawFiles(Files):
    """The files of an input, with the weights in them."""

    def weight(self, source: Source, rows: int, columns: int) -> PackedWeight:
        """One projection of one expert, E = 1.

        Raises:
            CheckpointError, Unsupported: values that PackedWeight refuses; named by file.
        """
        fields: dict[str, Any] = {}
        for part in source.dialect.parts:
            stored = source.parts[part]
            try:
                value = converted(self.tensor(stored), part.stored)
            except CheckpointError as error:
                raise CheckpointError(f"{stored}: {error}") from error
            fields[part.field] = value.reshape(1, *part.shape(rows, columns))
        dialect, place = source.dialect, source.parts[source.dialect.parts[0]]
        try:
            return PackedWeight(dialect.format, **fields, global_scale_op=dialect.global_scale_op)
        except ConfigError as error:
            raise CheckpointError(f"{place}: {error}") from error
        except Unsupported as error:
            raise Unsupported(f"{place}: {error}") from error


@dataclass(frozen=True)
class Entry:
    """A tensor to be written: name, dtype as safetensors spells it, shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        return BITS[self.dtype] // 8

    @property
    def nbytes(self) -> int:
        size = self.itemsize
        for dimension in self.shape:
            size *= dimension
        return size


class ShardWriter:
    """A safetensors file whose tensors come in any order, from any thread.

    It gets its name only when it is whole and on the disk. What an exception leaves is removed; a
    killed run leaves a file that ends in PARTIAL, which the next one overwrites.
    """

    def __init__(self, path: Path, entries: Sequence[Entry]) -> None:
        self._path = path
        self._partial = path.with_name(f".{path.name}{PARTIAL}")
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._places: dict[str, tuple[int, int]] = {}
        end = 0
        # Wide values first, as safetensors writes them: every tensor is aligned.
        for entry in sorted(entries, key=lambda e: (-e.itemsize, e.name)):
            offsets = end, end + entry.nbytes
            self._places[entry.name] = offsets
            header[entry.name] = {
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "data_offsets": list(offsets),
            }
            end = offsets[1]
        text = json.dumps(header, separators=(",", ":")).encode()
        self._header = text + b" " * (-len(text) % 8)
        self._size = 8 + len(self._header) + end
        self._lock = Lock()
        self._missing = {name: end - begin for name, (begin, end) in self._places.items()}

    def __enter__(self) -> Self:
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
        self._descriptor = os.open(self._partial, flags, 0o644)
        os.truncate(self._descriptor, self._size)
        _write_all(self._descriptor, len(self._header).to_bytes(8, "little") + self._header, 0)
        return self

    def write(self, name: str, content: Any, begin: int = 0) -> None:
        """Writes bytes of a tensor, from its byte `begin`; each byte is written once."""
        view = memoryview(content)
        start, _ = self._places[name]
        _write_all(self._descriptor, view, 8 + len(self._header) + start + begin)
        with self._lock:
            self._missing[name] -= len(view)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                assert not any(self._missing.values())
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)
        if kind is None:
            os.replace(self._partial, self._path)
            sync_folder(self._path.parent)
        else:
            self._partial.unlink(missing_ok=True)


class SameShard(ShardWriter):
    """A shard with the header of another one, byte by byte: the same tensors at the same places."""

    def __init__(self, path: Path, like: Path, infos: Sequence[TensorInfo]) -> None:
        super().__init__(path, ())
        with like.open("rb") as handle:
            self._header = handle.read(int.from_bytes(handle.read(8), "little"))
        start = 8 + len(self._header)
        self._places = {i.name: (i.offset - start, i.offset - start + i.nbytes) for i in infos}
        self._size = start + max((end for _, end in self._places.values()), default=0)
        self._missing = {info.name: info.nbytes for info in infos}


def _write_all(descriptor: int, content: Any, start: int) -> None:
    view, done = memoryview(content), 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], start + done)


def write_tensor(writer: ShardWriter, name: str, tensor: Tensor) -> None:
    """Writes all of a tensor, byte by byte as it lies in memory."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    writer.write(name, flat.numpy())


def sync_folder(folder: Path) -> None:
    """Makes renames in the folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, content: Mapping[str, Any] | Sequence[Any]) -> None:
    """Writes a JSON file at once: readers see the old one, none, or all of the new one."""
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    with _at_once(path) as partial:
        partial.write_text(text, encoding="utf-8")


def copy_file(source: Path, path: Path) -> None:
    """Copies a file at once, as `write_json` writes one."""
    with _at_once(path) as partial:
        shutil.copyfile(source, partial)


@contextmanager
def _at_once(path: Path) -> Iterator[Path]:
    """Gives the place of a partial file, which gets its name when it is on the disk."""
    partial = path.with_name(f".{path.name}{PARTIAL}")
    yield partial
    descriptor = os.open(partial, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(partial, path)
    sync_folder(path.parent)


def entries_of(base: str, dialect: Dialect, rows: int, columns: int) -> list[Entry]:
    """The tensors of a projection in a dialect, each in the first dtype that the dialect allows."""
    entries = []
    for part in dialect.parts:
        shape = part.shape(rows, columns)
        if not shape and dialect.global_scale_op == "divide":
            shape = (1,)  # compressed-tensors' scalars; ModelOpt's are ()
        entries.append(Entry(base + part.suffix, part.dtypes[0], shape))
    return entries
