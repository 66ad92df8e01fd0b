"""Counters of the experts kernel, by which its blocks tell each other what is taken and what is
done.

Zeros whenever no kernel runs: the kernel leaves them so. One set for each stream of an arena, so
whatever shares one is ordered as the arena asks it (runtime/workspace.py). A stream alone does not
tell: torch hands those beside calls out in turn, so two captures on streams of their own may have
the same one beside them, and their graphs may be replayed at the same time.
"""

import threading

import torch
from torch import Tensor

from exactmoe.config import MAX_EXPERTS
from exactmoe.runtime.arena import serving
from exactmoe.runtime.devices import allocating_beside_a_capture, capturing

# As kernels/cuda/fill.cuh counts them: four queues, and all experts.
NUM_COUNTERS = 4 + MAX_EXPERTS

# By the device, its stream, whether that is captured, and the home of the call's arena.
_Key = tuple[int, int, bool, tuple[torch.device, int] | None]
_made: dict[_Key, Tensor] = {}
_lock = threading.RLock()  # re-entrant: a signal handler may come while it is held


def counters(device: torch.device) -> Tensor:
    """int32 [NUM_COUNTERS] for kernels that this call queues on the device's current stream."""
    captured = capturing(device)
    stream = torch.cuda.current_stream(device).cuda_stream
    key = device.index, stream, captured, serving()
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
