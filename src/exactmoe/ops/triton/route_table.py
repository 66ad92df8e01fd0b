"""route_table: the slots of a call, sorted by expert."""

import triton
from torch import Tensor

from exactmoe.kernels.triton import route_table as kernels
from exactmoe.ops.triton.early import early
from exactmoe.runtime.routes import RouteTable

_SMALLEST_BLOCK, _LARGEST_BLOCK = 32, 4096
_IDS_OF_A_WARP = 512


def route_table(expert_ids: Tensor, num_experts: int, routes: RouteTable) -> None:
    """expert_ids int32 [T, K] -> routes, offsets and slots int32; ids < 0 are absent, ids >= E too,
    with a fault. One launch.
    """
    num_slots = expert_ids.numel()
    block = min(max(triton.next_power_of_2(num_slots), _SMALLEST_BLOCK), _LARGEST_BLOCK)
    kernels.route_table[(triton.cdiv(num_experts + 1, kernels.OWNED.value),)](
        expert_ids,
        routes.offsets,
        routes.slots,
        routes.fault,
        num_slots,
        num_experts,
        BLOCK_S=block,
        num_warps=max(block // _IDS_OF_A_WARP, 1),
        **early(expert_ids.device),
    )
