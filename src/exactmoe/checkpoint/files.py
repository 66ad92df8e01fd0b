"""Reading by place: bytes go from a file into memory that is there already.

Nothing is mapped, so nothing of a file stays resident, and threads need no lock.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, Self, cast

import torch
from torch import Tensor

from exactmoe.checkpoint.header import TensorInfo
from exactmoe.checkpoint.plan import Stored
from exactmoe.errors import CheckpointError

DTYPES = {
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "I32": torch.int32,
    "I64": torch.int64,
}
_CHUNK = 2**24
# Of one preadv (IOV_MAX of Linux).
_MOST_VIEWS = 1024


class Files:
    """The files of a folder, opened as they are needed and closed together; any thread may read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptors: dict[str, int] = {}
        self._lock = Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def read(self, info: TensorInfo, start: int, *into: memoryview) -> None:
        """Fills memory, one view after the other, from byte `start` of the tensor's file.

        Raises:
            CheckpointError: the file cannot be read, or has become shorter.
        """
        left = [view for view in into if len(view)]
        try:
            descriptor = self._descriptor(info.file)
            while left:
                count = os.preadv(descriptor, left[:_MOST_VIEWS], start)
                if count == 0:
                    raise CheckpointError(
                        f"{self._folder / info.file}: it ended inside {info.name}; it was longer "
                        "when its header was read"
                    )
                start += count
                while left and count >= len(left[0]):
                    count -= len(left.pop(0))
                if count:
                    left[0] = left[0][count:]
        except OSError as error:
            raise CheckpointError(
                f"{self._folder / info.file}: {info.name} cannot be read: {error}"
            ) from error

    def tensor(self, stored: Stored) -> Tensor:
        """What is taken of a tensor, in its stored dtype and in memory of its own."""
        found = place(stored)
        nbytes = math.prod(found.shape) * found.dtype.itemsize
        raw = torch.empty(nbytes, dtype=torch.uint8)
        self.read(stored.info, found.start, bytes_of(raw))
        return raw.view(found.dtype).reshape(found.shape)

    def chunks(self, info: TensorInfo) -> Iterator[bytearray]:
        """The bytes of a tensor, at most 16 MiB at a time."""
        for begin in range(0, info.nbytes, _CHUNK):
            chunk = bytearray(min(_CHUNK, info.nbytes - begin))
            self.read(info, info.offset + begin, memoryview(chunk))
            yield chunk

    def _descriptor(self, file: str) -> int:
        with self._lock:
            if file not in self._descriptors:
                self._descriptors[file] = os.open(self._folder / file, os.O_RDONLY)
            return self._descriptors[file]


@dataclass(frozen=True)
class Place:
    """Where what is taken of a tensor lies in its file: one run of bytes.

    Attributes:
        start: its first byte.
        dtype, shape: of its values.
    """

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def place(stored: Stored) -> Place:
    """The place of what is taken of a tensor: all of it, or an expert's rows or value."""
    info, index = stored.info, stored.index
    shape, skipped = list(info.shape), 0
    for dimension, taken in enumerate(index):
        below = math.prod(info.shape[dimension + 1 :])
        if isinstance(taken, slice):
            # The rows after it are whole ones: else it were no single run.
            assert dimension == len(index) - 1 and taken.step is None
            skipped += taken.start * below
            shape[dimension] = taken.stop - taken.start
        else:
            skipped += taken * below
    whole = sum(not isinstance(taken, slice) for taken in index)
    dtype = DTYPES[info.dtype]
    return Place(info.offset + skipped * dtype.itemsize, dtype, tuple(shape[whole:]))


def bytes_of(raw: Tensor) -> memoryview:
    """The memory of a contiguous uint8 tensor on the host, to be written."""
    return memoryview(cast(Any, raw.numpy()))
