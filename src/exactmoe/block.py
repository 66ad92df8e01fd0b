"""Block: what MoELayer and DenseMLP share.

A call is cut into pieces of `max_rows` tokens that run in the workspace of the block's device.
"""

from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import Tensor

from exactmoe.bank import ExactModule
from exactmoe.config import Limits
from exactmoe.plan import Plan
from exactmoe.runtime.workspace import Arena, Region, arena, total_bytes


class Block(ExactModule):
    """What MoELayer and DenseMLP share: a backend, a workspace, and calls cut into pieces."""

    def __init__(self, limits: Limits | None, backend: str) -> None:
        super().__init__()
        self.limits = limits or Limits()
        self.backend = backend
        self._views: tuple[int, dict[str, Tensor]] | None = None

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
        """Set the tokens a piece and make the device's arena large enough. Not inside a call, not
        while capturing.
        """
        self.limits = Limits(max_rows=max_rows, checks=self.limits.checks)
        self._views = None
        self._arena().reserve(self.workspace_bytes())

    def _arena(self) -> Arena:
        return arena(self.device)

    def _workspace(self) -> dict[str, Tensor]:
        held = self._arena()
        if self._views is None or self._views[0] != held.generation:
            self._views = (held.generation, held.views(self.regions(self.limits.max_rows)))
        return self._views[1]

    def _pieces(self, num_tokens: int) -> Iterator[slice]:
        for start in range(0, num_tokens, self.limits.max_rows):
            yield slice(start, min(start + self.limits.max_rows, num_tokens))

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
