"""route_table: the slots of a call, sorted by expert, stable."""

from exactmoe.kernels.cpu.compile import kernel_jit


@kernel_jit
def route_table(expert_ids, offsets, slots, fault):
    """expert_ids int32 [S] -> offsets [E + 1], slots [S], fault [1], int64 (runtime/routes.py)."""
    num_experts = offsets.shape[0] - 1
    offsets[:] = 0
    for slot in range(expert_ids.shape[0]):
        expert = expert_ids[slot]
        if expert >= num_experts:
            fault[0] = 1
        elif expert >= 0:
            offsets[expert + 1] += 1
    for expert in range(num_experts):
        offsets[expert + 1] += offsets[expert]
    ends = offsets[:-1].copy()
    for slot in range(expert_ids.shape[0]):
        expert = expert_ids[slot]
        if 0 <= expert < num_experts:
            slots[ends[expert]] = slot
            ends[expert] += 1
