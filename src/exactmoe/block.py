"""Block: what MoELayer and DenseMLP share.

A call is cut into pieces of `max_rows` tokens that run in the workspace of the block's device.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from exactmoe.bank import ExactModule
from exactmoe.config import Limits
from exactmoe.ops import DECODED, DEVICE, Path, Storage, path
from exactmoe.plan import Plan, backends
from exactmoe.runtime.workspace import Arena, Region, arena, total_bytes


class Block(ExactModule):
    """What MoELayer and DenseMLP share: a backend, a workspace, and calls cut into pieces.

    Weights may be changed in place or exchanged between calls; call `refresh()` after a write
    through `.data` or numpy, which torch does not count.
    """

    def __init__(self, limits: Limits | None, backend: str) -> None:
        super().__init__()
        self._limits = limits or Limits()
        self.backend = backend
        self._views: tuple[int, int, Storage, dict[str, Tensor]] | None = None

    @property
    def limits(self) -> Limits:
        """Tokens a piece, and checks. `reserve` changes the tokens."""
        return self._limits

    @property
    def device(self) -> torch.device:
        raise NotImplementedError

    def regions(self, rows: int, storage: Storage) -> list[Region]:
        """The arrays of a piece of `rows` tokens, in the types of a path."""
        raise NotImplementedError

    def plan(self) -> Plan:
        """The backend that a call takes now, and why."""
        raise NotImplementedError

    def workspace_bytes(self, max_rows: int | None = None) -> int:
        """Bytes of workspace for calls of `max_rows` tokens a piece (default: as now). A closed
        form, nothing runs.
        """
        rows = max(self.limits.max_rows if max_rows is None else max_rows, 1)
        return max(total_bytes(self.regions(rows, s)) for s in _storages(self.device))

    def reserve(self, max_rows: int) -> None:
        """Set the tokens a piece and make the device's arena large enough. Waits for the calls of
        other threads; not while capturing.

        Raises:
            ConfigError: max_rows is no positive integer.
            Unsupported: the memory could not be allocated, or a call is running on this thread. The
                layer is as it was.
        """
        limits = Limits(max_rows=max_rows, checks=self.limits.checks)

        def assign() -> None:
            self._limits = limits

        self._arena().reserve(self.workspace_bytes(max_rows), assign)

    def _arena(self) -> Arena:
        return arena(self.device)

    def _workspace(self, max_rows: int) -> dict[str, Tensor]:
        held, kept = self._arena(), self._views
        storage = path(self.plan().backend).storage
        if kept is None or kept[:3] != (held.generation, max_rows, storage):
            views = held.views(self.regions(max_rows, storage))
            kept = self._views = (held.generation, max_rows, storage, views)
        return kept[3]

    def _in_pieces(
        self, num_tokens: int, compute: Callable[[dict[str, Tensor], slice], None]
    ) -> None:
        """compute(space, piece) for each piece of a call, in the workspace, with no other call in
        between.
        """

        def pieces() -> None:
            max_rows = self.limits.max_rows  # once: all pieces have this size
            space = self._workspace(max_rows)
            for start in range(0, num_tokens, max_rows):
                compute(space, slice(start, min(start + max_rows, num_tokens)))

        self._arena().exclusively(pieces)

    def _own_memory(self) -> dict[str, Tensor]:
        """What a caller's `out` may not lie in: the weights and the workspace."""
        own = {f"the layer's {name}": buffer for name, buffer in self.named_buffers()}
        return {**own, "the workspace": self._arena().memory}

    def _forget(self) -> None:
        super()._forget()
        self._views = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._arena().reserve(self.workspace_bytes())
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_views": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._arena().reserve(self.workspace_bytes())


def _storages(device: torch.device) -> tuple[Storage, ...]:
    """Of all backends that a layer on this device may take from call to call."""
    if device.type == "cuda":
        return (DEVICE,)
    return (DECODED, DEVICE) if "triton" in backends(device) else (DECODED,)


def lies_well(tensor: Tensor) -> bool:
    """Whether kernels can read a tensor where it is: contiguous, at a multiple of 16 bytes."""
    return tensor.is_contiguous() and tensor.data_ptr() % 16 == 0


def staged(path: Path, space: dict[str, Tensor], x: Tensor) -> Tensor:
    """x bfloat16 [T, H] as the path reads it: the caller's own memory, or a copy in `x`."""
    if path.storage.reads_given and lies_well(x):
        return x
    return space["x"][: x.shape[0]].copy_(x)
