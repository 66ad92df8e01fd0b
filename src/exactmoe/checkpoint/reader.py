"""Reading values: tensors are copied out of the mapped files into memory of their own."""

import re
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from exactmoe.checkpoint.dialects import Part
from exactmoe.checkpoint.header import TensorInfo
from exactmoe.checkpoint.index import Checkpoint
from exactmoe.checkpoint.plan import Source, Stored, WeightPlan
from exactmoe.checkpoint.values import converted
from exactmoe.errors import CheckpointError, ConfigError, Unsupported
from exactmoe.formats import PackedWeight

DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "I64": torch.int64}
# Mapped pages count as ours until a file is closed: after so many bytes the files are opened anew.
MAPPED_BYTES = 2**28

Progress = Callable[[int], None]


class Reader:
    """Opens the files of a checkpoint as they are needed, and closes them together.

    Args:
        checkpoint: what to read from.
        progress: called with the bytes of every read.
    """

    def __init__(self, checkpoint: Checkpoint, progress: Progress | None = None) -> None:
        self._checkpoint = checkpoint
        self._progress = progress
        self._files: dict[str, safe_open] = {}
        self._stack = ExitStack()
        self._mapped_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close()

    def copy(self, stored: Stored, out: Tensor) -> None:
        """Copies what an expert takes of a tensor into `out`, of as many values, exactly."""
        if self._mapped_bytes >= MAPPED_BYTES:
            self._close()
        values = self._mapped(stored.info)[stored.index]
        self._mapped_bytes += values.nbytes
        try:
            out.copy_(converted(values, out.dtype).reshape(out.shape))
        except CheckpointError as error:
            raise CheckpointError(f"{stored}: {error}") from error
        if self._progress is not None:
            self._progress(values.nbytes)

    def tensor(self, info: TensorInfo) -> Tensor:
        """One tensor of dtype BF16, F32 or I64, in memory of its own."""
        out = torch.empty(info.shape, dtype=DTYPES[info.dtype])
        self.copy(Stored(info), out)
        return out

    def weight(self, plan: WeightPlan) -> PackedWeight:
        """All experts of a projection, stacked.

        Raises:
            CheckpointError: a byte that the contract refuses; the message names file, tensor,
                expert, row and block.
            Unsupported: values that are legal but cannot be run, named alike.
        """
        experts = len(plan.sources)
        fields: dict[str, Tensor] = {}
        for part in plan.dialect.parts:
            shape = (experts, *part.shape(plan.rows, plan.columns))
            stacked = fields[part.field] = torch.empty(shape, dtype=part.stored)
            for source, out in zip(plan.sources, stacked, strict=True):
                self.copy(source.parts[part], out)
        dialect = plan.dialect
        try:
            return PackedWeight(dialect.format, **fields, global_scale_op=dialect.global_scale_op)
        except ConfigError as error:
            raise CheckpointError(f"{_place(plan, str(error))}: {error}") from error
        except Unsupported as error:
            raise Unsupported(f"{_place(plan, str(error))}: {error}") from error

    def _mapped(self, info: TensorInfo) -> Tensor:
        path = self._checkpoint.path / info.file
        try:
            if info.file not in self._files:
                opened = safe_open(path, framework="pt")
                self._files[info.file] = self._stack.enter_context(opened)
            return self._files[info.file].get_tensor(info.name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: {info.name} cannot be read: {error}") from error

    def _close(self) -> None:
        self._files.clear()
        self._stack.close()
        self._mapped_bytes = 0


def _place(plan: WeightPlan, message: str) -> Stored:
    """File and tensor that a refusal of PackedWeight is about; its message names the expert."""
    expert = re.search(r"\bexpert (\d+)", message)
    source: Source = plan.sources[int(expert[1]) if expert else 0]
    start = re.match("global scale|code", message)
    field = {"global scale": "global_scale", "code": "codes"}[start[0]] if start else "scales"
    parts: list[Part] = [part for part in source.dialect.parts if part.field == field]
    return source.parts[parts[0] if parts else source.dialect.parts[0]]
