"""RouteTable: the slots of a call, sorted by expert."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class RouteTable:
    """Which slots each expert serves. A slot is t x K + k; inside an expert slots ascend.

    Attributes:
        offsets: int64 [E + 1]; expert e serves slots[offsets[e] : offsets[e + 1]]. Absent slots are
            in no expert.
        slots: int64 [S], S = T x K; entries from offsets[E] on are not written.
        fault: int64 [1]; set to 1 when an id >= E was met, never cleared here.
    """

    offsets: Tensor
    slots: Tensor
    fault: Tensor
