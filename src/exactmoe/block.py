"""Block: what MoELayer and DenseMLP share.

A call is cut into pieces of `max_rows` tokens that run in the workspace of the block's device.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from exactmoe import env, ops
from exactmoe.bank import ExactModule
from exactmoe.config import Limits, checked_limits, checked_max_rows
from exactmoe.errors import Unsupported
from exactmoe.ops import DECODED, DEVICE, Path, Storage, gpu_storages
from exactmoe.plan import Plan, architecture_of, backends
from exactmoe.runtime import notes, workspace
from exactmoe.runtime.devices import capturing, current
from exactmoe.runtime.spans import CallSpans, LayerSpans
from exactmoe.runtime.workspace import Arena, Region, total_bytes


@dataclass(frozen=True)
class Space:
    """What one call runs with.

    Attributes:
        path: of the backend that was chosen for this call.
        arrays: of the workspace, by name; as many rows as a piece may have.
        arena: that they lie in.
        cards: of each of several cards, its own arrays.
        spans: what records the steps of this piece, if somebody profiles it.
    """

    path: Path
    arrays: dict[str, Tensor]
    arena: Arena
    cards: "tuple[Space, ...]" = ()
    spans: CallSpans | None = None

    def rows(self, name: str, count: int) -> Tensor:
        """The first `count` rows of an array."""
        return self.arrays[name][:count]

    def recorded(self, spans: CallSpans, card: int = 0) -> "Space":
        """The same space, whose ops are spans of this piece on a card."""
        return replace(self, path=ops.timed(self.path, spans, card), spans=spans)

    def staged(self, x: Tensor) -> Tensor:
        """x bfloat16 [T, H] as the path reads it: the caller's own memory, or a copy in `x`."""
        if self.reads(x):
            return x
        return self.rows("x", x.shape[0]).copy_(x)

    def reads(self, tensor: Tensor) -> bool:
        """Whether the path reads a caller's tensor where it is: contiguous, at a multiple of 16
        bytes.
        """
        given = self.path.storage.reads_given
        return given and tensor.is_contiguous() and tensor.data_ptr() % 16 == 0


class Block(ExactModule):
    """What MoELayer and DenseMLP share: a backend, a workspace, and calls cut into pieces.

    Weights may be changed in place or exchanged between calls; call `refresh()` after a write
    through `.data` or numpy, which torch does not count.
    """

    def __init__(self, limits: Limits | None, backend: str) -> None:
        super().__init__()
        self._limits = checked_limits(limits)
        self.backend = backend
        self.spans: LayerSpans | None = None  # records the steps of its calls, while it is set

    @property
    def limits(self) -> Limits:
        """Tokens a piece on this device, and checks. `reserve` changes the tokens."""
        return replace(self._limits, max_rows=self.max_rows)

    @property
    def max_rows(self) -> int:
        """Tokens a piece on this device."""
        return self._limits.rows_on(self.device)

    @property
    def device(self) -> torch.device:
        raise NotImplementedError

    def regions(self, rows: int, storage: Storage) -> list[Region]:
        """The arrays of a piece of `rows` tokens, in the types of a path."""
        raise NotImplementedError

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """All devices that a call works on, the block's own first."""
        return (self.device,)

    def regions_on(self, device: torch.device, rows: int, storage: Storage) -> list[Region]:
        """Those of `regions` that lie on one of its devices."""
        return self.regions(rows, storage)

    def plan(self) -> Plan:
        """The backend that a call takes now, and why."""
        raise NotImplementedError

    def _a8_units(self) -> str:
        """Numerics.a8_units of the routed experts; "" where there are none."""
        return ""

    def workspace_bytes(self, max_rows: int | None = None) -> int:
        """Bytes of workspace for calls of `max_rows` tokens a piece (default: as now; at least 1).
        A closed form, nothing runs.

        Each stream that calls has an arena of this size, or of what another layer of the device
        needs if that is more; so have the graphs that are captured on one stream.
        """
        return sum(self.workspace_bytes_on(device, max_rows) for device in self.devices)

    def workspace_bytes_on(self, device: torch.device, max_rows: int | None = None) -> int:
        """What of `workspace_bytes` is on one of the block's devices."""
        rows = max(self.max_rows if max_rows is None else max_rows, 1)
        storages = _storages(self.device, self._a8_units())
        return max(total_bytes(self.regions_on(device, rows, s)) for s in storages)

    def reserve(self, max_rows: int) -> None:
        """Set the tokens a piece and make the device's workspace large enough. Waits for the calls
        of other threads; not while capturing.

        Raises:
            ConfigError: max_rows is no positive integer.
            Unsupported: the memory could not be allocated, a call is running on this thread, or the
                workspace would grow while a captured graph may be alive. The layer is as it was.
        """
        limits = replace(self._limits, max_rows=checked_max_rows(max_rows))
        for device in self.devices:
            nbytes = self.workspace_bytes_on(device, max_rows)
            workspace.require_no_captures(device, nbytes, self.device)

        def assign() -> None:
            self._limits = limits

        self._reserve(max_rows, assign)

    def _reserve(self, max_rows: int | None = None, then: Callable[[], None] | None = None) -> None:
        if capturing(self.device):
            raise Unsupported(
                "a CUDA graph is being captured; allowed: to make, move or reserve layers before it"
            )
        home, *others = self.devices
        for device in others:
            nbytes = self.workspace_bytes_on(device, max_rows)
            workspace.reserve_beside(home, device, self, nbytes)
        workspace.reserve(home, self, self.workspace_bytes_on(home, max_rows), then)

    def reset(self) -> None:
        """Let calls begin again after one on several cards has failed. Waits for all of them.

        Raises:
            Unsupported: a device cannot be waited for.
        """
        workspace.reset(self.device)

    def _ready(self) -> None:
        """Ends the making of a block: its workspace, and on a GPU its weights as its path reads
        them, so that the first call may be captured.
        """
        self._reserve()
        if self.device.type == "cuda":
            with current(self.device):
                self._prepare(ops.path(self.plan().path))

    def _prepare(self, path: Path) -> None:
        """Make what the path needs of the weights."""
        raise NotImplementedError

    def _in_pieces(self, num_tokens: int, compute: Callable[[Space, slice], None]) -> None:
        """compute(space, piece) for each piece of a call, in the workspace, with no other call in
        between.
        """
        path = ops.path(self.plan().path)
        with current(self.device):
            held = workspace.arena(self.device)

            def pieces() -> None:
                rows = self.max_rows  # once: all pieces have this size
                space = self._space(path, held, rows)
                for start in range(0, num_tokens, rows):
                    piece = slice(start, min(start + rows, num_tokens))
                    if self.spans is None:
                        compute(space, piece)
                    else:
                        with self.spans.call(piece.stop - start, self.device) as spans:
                            compute(space if spans is None else space.recorded(spans), piece)

            held.exclusively(pieces)

    def _space(self, path: Path, held: Arena, rows: int) -> Space:
        """What a call runs with, for pieces of up to `rows` tokens."""
        arrays = held.views_for(
            self, (rows, path.storage), lambda: self.regions(rows, path.storage)
        )
        return Space(path, arrays, held)

    def _own_memory(self) -> dict[str, Tensor]:
        """What a caller's `out` may not lie in: the weights and the workspace."""
        own = {f"the layer's {name}": buffer for name, buffer in self.named_buffers()}
        return {**own, "the workspace": workspace.arena(self.device).memory}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._reserve()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._reserve()


def _storages(device: torch.device, a8_units: str) -> tuple[Storage, ...]:
    """Of all backends that a layer on this device may take from call to call."""
    if device.type == "cuda":
        fast = "cuda" in architecture_of(device).backends
        return gpu_storages(a8_units) if fast else (DEVICE,)
    return (DECODED, DEVICE) if "triton" in backends(device) else (DECODED,)


def lever(name: str) -> Any:
    """The value of a switch that is there for comparison; said once when it is not the default."""
    value = env.read(name)
    if value != env.SWITCHES[name].default:
        _warn(name, value)
    return value


def say_first(space: Space, kind: int, count: int, text: Callable[[], str]) -> None:
    """Log a line when a path first runs `count` rows of a kind of layer, and each switch that is
    not at its default. What is the same for several layers is logged once.
    """

    def told() -> str:
        for name, value in env.changed().items():
            _warn(name, value)
        return text()

    notes.once(logging.INFO, (space.arena.device, space.path.name, kind, count), told)


def _warn(name: str, value: Any) -> None:
    meaning = env.SWITCHES[name].meaning
    line = f"{name} is not at its default ({env.plain(value)}): {meaning}"
    notes.once(logging.WARNING, (name, value), lambda: line)
