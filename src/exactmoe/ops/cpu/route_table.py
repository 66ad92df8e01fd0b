"""route_table: the slots of a call, sorted by expert."""

from torch import Tensor

from exactmoe.kernels.cpu import route_table as kernels
from exactmoe.runtime.routes import RouteTable


def route_table(expert_ids: Tensor, num_experts: int, routes: RouteTable) -> None:
    """expert_ids int32 [T, K] -> routes; ids < 0 are absent, ids >= E too, with a fault."""
    assert routes.offsets.shape[0] == num_experts + 1
    arrays = (expert_ids.view(-1), routes.offsets, routes.slots, routes.fault)
    kernels.route_table(*(array.numpy() for array in arrays))
