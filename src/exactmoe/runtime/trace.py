"""RouteRing: which experts the tokens of a layer chose, kept on the layer's device and read later.

Recording is a few small launches into memory that was allocated before: no host read and fixed
addresses, so a captured graph records on every replay. A layer without a ring does nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from exactmoe.errors import ConfigError


@dataclass(frozen=True, eq=False)
class Recorded:
    """What a ring holds, oldest token first, on the CPU.

    Attributes:
        steps: int64 [N]; pieces of calls, counted from 0.
        tokens: int64 [N], the token's row in its step.
        expert_ids: int32 [N, K].
        lost: tokens that later ones overwrote.
    """

    steps: Tensor
    tokens: Tensor
    expert_ids: Tensor
    lost: int


class RouteRing:
    """The last `capacity` tokens that one layer routed. Its layer's calls must be ordered: one
    stream at a time.

    Args:
        device: of the layer.
        top_k: K.
        capacity: tokens it holds; memory is capacity x (4 x K + 24) bytes.

    Raises:
        ConfigError: a capacity below 1.
    """

    def __init__(self, device: torch.device, top_k: int, capacity: int) -> None:
        if capacity < 1:
            raise ConfigError(f"capacity is {capacity}; allowed: tokens from 1")
        self.capacity = capacity
        with torch.inference_mode(False):  # else it could not be written outside of that mode
            self._ids = torch.full((capacity, top_k), -1, dtype=torch.int32, device=device)
            self._places = torch.zeros((2, capacity), dtype=torch.int64, device=device)
            self._ramp = torch.arange(capacity, device=device)
            self._counted = torch.zeros(2, dtype=torch.int64, device=device)

    def record(self, expert_ids: Tensor) -> None:
        """Add the tokens of one step: expert_ids int32 [T, K] on the ring's device."""
        num_tokens = expert_ids.shape[0]
        skipped = max(num_tokens - self.capacity, 0)
        rows = self._ramp[: num_tokens - skipped] + skipped
        place = (rows + self._counted[0]) % self.capacity
        self._ids.index_copy_(0, place, expert_ids[skipped:])
        self._places[0].index_copy_(0, place, self._counted[1].expand_as(rows))
        self._places[1].index_copy_(0, place, rows)
        self._counted[0].add_(num_tokens)
        self._counted[1].add_(1)

    def read(self) -> Recorded:
        """What was recorded since the ring was made. Waits for the device."""
        total = int(self._counted[0])
        held = min(total, self.capacity)
        order = (torch.arange(total - held, total) % self.capacity).to(self._ids.device)
        steps, tokens = self._places[:, order].cpu()
        return Recorded(steps, tokens, self._ids[order].cpu(), total - held)
