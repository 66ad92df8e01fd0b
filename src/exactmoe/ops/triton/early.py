"""early: which small kernels wait themselves, and which of them ask to be started early.

Only a kernel that is compiled with the wait (kernels/triton/early.py) asks. All others, those of
torch and copies as well, start after the end of everything before them.

Two streams: an event behind such a kernel is reached when everything before it has ended. A kernel
behind a wait for an event may get both kinds of edges in a captured graph. What stands on the edges
cannot hurt its order: ordinary edges hold back its start, programmatic ones its own wait. But edges
that do not wait for the end of a kernel do not count as joins when a capture ends (CUDA guide,
edge data of graphs), so whoever joins a second stream of ours does not ask (eager calls neither:
both run the same code). Cards: behind a wait for another card comes a lookup or a copy, which do
not ask.
"""

from typing import Any

import torch

from exactmoe import env
from exactmoe.ops.triton.launch import architecture
from exactmoe.plan.architectures import ARCHITECTURES

# About as many small programs as a card holds at a time. Of a kernel with more, each program's wait
# costs more than the early start brings (H200, 131072 programs: 159 us, without 108).
_MOST_PROGRAMS = 4096


def early(
    device: torch.device, joins: bool = False, units: bool = False, programs: int = 1
) -> dict[str, Any]:
    """Of a launch on the device: PDL, whether the kernel waits and lets the next one start; and,
    only where it asks to be started early, the launcher's option for that.

    Args:
        joins: it is the first after a second stream of ours may have come back.
        units: it runs on the matrix units. The compiler takes their tensor memory (sm_100) before
            the wait, where a kernel that still runs might need it.
        programs: of the launch.
    """
    row = ARCHITECTURES.get(architecture(device))
    if row is None or not row.early or not env.read("EXACTMOE_EARLY") or programs > _MOST_PROGRAMS:
        return {"PDL": False}
    if joins or (units and row.instruction.startswith("tcgen05")):
        return {"PDL": True}
    return {"PDL": True, "launch_pdl": True}
