"""Reading by place: bytes go from a file into memory that is there already.

Nothing is mapped, so nothing of a file stays resident, and threads need no lock.
"""

import os
from collections.abc import Iterator
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
        start, part = place(stored)
        raw = torch.empty(part.numel() * part.element_size(), dtype=torch.uint8)
        self.read(stored.info, start, bytes_of(raw))
        return raw.view(part.dtype).reshape(part.shape)

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


def place(stored: Stored) -> tuple[int, Tensor]:
    """Where what is taken of a tensor lies: its first byte in the file, and a tensor without memory
    of its dtype and shape. It is one run of bytes.
    """
    info = stored.info
    whole = torch.empty(info.shape, dtype=DTYPES[info.dtype], device="meta")
    part = whole[stored.index]
    assert part.is_contiguous()
    return info.offset + int(part.storage_offset()) * part.element_size(), part


def bytes_of(raw: Tensor) -> memoryview:
    """The memory of a contiguous uint8 tensor on the host, to be written."""
    return memoryview(cast(Any, raw.numpy()))
