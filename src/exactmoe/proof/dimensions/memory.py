"""Memory: what the workspace and the allocator's blocks held before the call."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from exactmoe.proof.trial import Trial
from exactmoe.runtime.workspace import arena

_STREAM = 60
_WIDTHS = (1, 5, 64)
# Every float32 and bfloat16 becomes NaN, +0, 3.4e38.
BYTES = (0xFF, 0x00, 0x7F)


def memory(trial: Trial) -> None:
    """The workspace filled with NaN, zeros and huge numbers before the call, and after it.

    What torch allocates without writing reads as NaN meanwhile. A y that lies in the workspace
    would change when it is filled after the call.
    """
    device = trial.entry.layer.device
    held = arena(device)
    for tokens in _WIDTHS:
        batch = trial.random(tokens, _STREAM)
        expected = trial.run(batch).clone()
        for byte in BYTES:
            held.fill(byte)
            poison_allocator(device)
            with unwritten_reads_nan():
                y = trial.run(batch)
            trial.compare("memory", f"workspace of bytes 0x{byte:02X}", expected, y)
            held.fill(byte)
            trial.compare("memory", "y after the workspace was filled", expected, y)


def poison_allocator(device: torch.device) -> None:
    """Blocks of a GPU's allocator, large and small, written and given back (field fault A19)."""
    if device.type != "cuda":
        return
    for value in (float("nan"), 3e38):
        for count, nbytes in ((4, 1 << 28), (64, 1 << 19), (64, 1 << 12)):
            blocks = [torch.full((nbytes // 4,), value, device=device) for _ in range(count)]
            del blocks


@contextmanager
def unwritten_reads_nan() -> Iterator[None]:
    """torch.empty and its kin return NaN: PyTorch's own fill, which deterministic mode turns on."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
