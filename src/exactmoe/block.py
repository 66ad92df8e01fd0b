"""Block: what MoELayer and DenseMLP share.

A call is cut into pieces of `max_rows` tokens that run in the workspace of the block's device.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from exactmoe.bank import ExactModule
from exactmoe.config import Limits
from exactmoe.plan import Plan
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
        self._views: tuple[int, int, dict[str, Tensor]] | None = None

    @property
    def limits(self) -> Limits:
        """Tokens a piece, and checks. `reserve` changes the tokens."""
        return self._limits

    @property
    def device(self) -> torch.device:
        raise NotImplementedError

    def regions(self, rows: int) -> list[Region]:
        raise NotImplementedError

    def plan(self) -> Plan:
        """The backend that a call takes now, and why."""
        raise NotImplementedError

    def workspace_bytes(self, max_rows: int | None = None) -> int:
        """Bytes of workspace for calls of `max_rows` tokens a piece (default: as now). A closed
        form, nothing runs.
        """
        return total_bytes(self.regions(max_rows or self.limits.max_rows))

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
        if kept is None or kept[:2] != (held.generation, max_rows):
            kept = self._views = (held.generation, max_rows, held.views(self.regions(max_rows)))
        return kept[2]

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
