"""A second stream beside the one of a call: work forks to it and joins again, eager or captured."""

from collections.abc import Callable
from typing import TypeVar

import torch

_Beside = TypeVar("_Beside")
_Here = TypeVar("_Here")


class SideStream:
    """A stream of a GPU and the two events that tie it to the stream of a call."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Of another pool than the streams that callers make: torch hands those out in turn, and a
        # caller's own stream must not be drawn into a capture.
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._fork, self._join = torch.cuda.Event(), torch.cuda.Event()

    def run(
        self, beside: Callable[[], _Beside], here: Callable[[], _Here]
    ) -> tuple[_Beside, _Here]:
        """Queues beside() on the second stream and here() on the current one; what is queued
        afterwards waits for both, even after an exception.
        """
        main = torch.cuda.current_stream(self._device)
        self._fork.record(main)
        self._stream.wait_event(self._fork)
        try:
            with torch.cuda.stream(self._stream):
                first = beside()
            second = here()
        finally:
            self._join.record(self._stream)
            main.wait_event(self._join)
        return first, second
