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


def early(device: torch.device, joins: bool = False) -> dict[str, Any]:
    """Of a launch on the device: PDL, whether the kernel waits and lets the next one start; and,
    only where it asks to be started early, the launcher's option for that.

    joins: it is the first after a second stream of ours may have come back.
    """
    row = ARCHITECTURES.get(architecture(device))
    waits = row is not None and row.early and env.read("EXACTMOE_EARLY")
    return {"PDL": waits, "launch_pdl": True} if waits and not joins else {"PDL": waits}
