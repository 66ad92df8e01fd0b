"""Counters of the experts kernel, by which its blocks tell each other what is taken and what is
done.

Zeros whenever no kernel runs: the kernel leaves them so. One set for each stream, and for each
stream that captures CUDA graphs, whose replays must be ordered as their workspace asks it
(runtime/workspace.py).
"""

import threading

import torch
from torch import Tensor

from exactmoe.runtime.devices import allocating_beside_a_capture, capturing

# As kernels/cuda/fill.cuh counts them: four queues, and up to 1024 experts.
NUM_COUNTERS = 4 + 1024

_made: dict[tuple[int, int, bool], Tensor] = {}
_lock = threading.RLock()  # re-entrant: a signal handler may come while it is held


def counters(device: torch.device) -> Tensor:
    """int32 [NUM_COUNTERS] for kernels that are queued on the device's current stream now."""
    captured = capturing(device)
    key = device.index, torch.cuda.current_stream(device).cuda_stream, captured
    with _lock:
        found = _made.get(key)
        if found is None:
            found = _made[key] = _zeros(device, captured)
    return found


def _zeros(device: torch.device, captured: bool) -> Tensor:
    """In a capture they are made beside it: a graph that made them would do so in each replay."""
    # Memory made in inference mode could not be written outside of it.
    with torch.inference_mode(False):
        if not captured:
            return torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=device)
        with allocating_beside_a_capture():
            # Of a pool that nobody else draws from (callers: 0; runtime/streams.py: -1): torch
            # hands streams out in turn, and one that is being captured cannot be waited for.
            beside = torch.cuda.Stream(device, priority=-2)
            with torch.cuda.stream(beside):
                made = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=device)
            beside.synchronize()
            return made
