"""gate_up and down of the routed experts, launched as on a card and run by the emulator."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import emulate
from exactmoe.ops.cuda import experts
from exactmoe.ops.cuda.counters import NUM_COUNTERS
from exactmoe.ops.cuda.prepare import CudaWeight


@dataclass
class Launches:
    """How the next kernels run, and on what.

    Attributes:
        blocks: most blocks of a grid, as the SMs of a card.
        together: of them, how many live at the same time, as if others had the card too.
        seed: of the order.
        reads: all tensors that kernels may only read, by name.
        writes: those that they may write too.
        change: what is done to a kernel's text before it runs.
        counters: of the stream; zeros behind every launch.
    """

    blocks: int = 3
    together: int = emulate.ALL
    seed: int = 0
    reads: dict[str, Tensor] = field(default_factory=dict)
    writes: dict[str, Tensor] = field(default_factory=dict)
    change: Any = None
    counters: Tensor = field(default_factory=lambda: torch.zeros(NUM_COUNTERS, dtype=torch.int32))

    def weight(self, name: str, weight: CudaWeight) -> None:
        """The tensors of a weight are read."""
        for part in ("codes", "scales", "factors", "on_fp8"):
            self.reads[f"{name} {part}"] = getattr(weight, part)

    def kernel(self, what: Any) -> Any:
        """In place of kernels.cuda.compile.kernel."""

        def launch(device, stream, grid, arguments, early):
            text = what.text() if self.change is None else self.change(what.text())
            emulate.run(
                text,
                what.entry,
                grid,
                what.shared_bytes,
                arguments,
                self.reads,
                self.writes | {"counters": self.counters},
                emulate.Order(self.seed, self.together),
            )
            assert not self.counters.any(), f"not zeros: {self.counters.nonzero().tolist()}"

        return SimpleNamespace(launch=launch)


@contextmanager
def emulated() -> Iterator[Launches]:
    """Inside, ops/cuda/experts.py launches on the emulator."""
    launches = Launches()
    stream = SimpleNamespace(cuda_stream=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "kernel", launches.kernel)
        patch.setattr(experts, "processors", lambda device: launches.blocks)
        patch.setattr(experts, "counters", lambda device: launches.counters)
        patch.setattr(torch.cuda, "current_stream", lambda device: stream)
        yield launches
