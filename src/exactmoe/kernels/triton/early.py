"""Kernels that may start while the kernel before them ends (programmatic dependent launch).

Such a kernel waits first of all, before any access to global memory, until the kernels before it in
the stream have ended and what they wrote is seen; only then does it let the next one start. So its
end means the end of everything before it, to events, copies and kernels that know nothing of this;
and when a kernel starts, at most the one before it still runs. What a later kernel reads before its
own wait (weights, a route table) must therefore be older than the kernel before it.

The wait does nothing in a kernel that was not started early. A kernel without it must never be: it
would read what is not yet written (ops/triton/early.py ties the two together).
"""

import triton
import triton.language as tl


@triton.jit
def in_turn(PDL: tl.constexpr):
    """Waits for the kernels before, then lets the next one start. A kernel's first statement: loads
    of a pipelined loop would be moved before a wait inside of it.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
