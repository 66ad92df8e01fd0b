"""Memory of cards: how much is free, and a refusal that says so where it does not do."""

from pathlib import Path

import torch
from torch import Tensor

from exactmoe.errors import Unsupported
from exactmoe.runtime.sizes import gib

_MEMINFO = Path("/proc/meminfo")
# Limit and use of the group of processes that a container is (cgroup v2).
_CGROUP = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> int | None:
    """Bytes that this process can still allocate on a device; None where nobody says.

    A GPU: what its driver has left and what torch keeps unused. The host: available memory, or what
    is left of the limit of its container.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free) + kept
    return _host_bytes()


def _host_bytes() -> int | None:
    found = [size for size in (_available(), _left_of_group()) if size is not None]
    return min(found, default=None)


def _available() -> int | None:
    if not _MEMINFO.is_file():
        return None
    for line in _MEMINFO.read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _left_of_group() -> int | None:
    limit, used = (_CGROUP / name for name in ("memory.max", "memory.current"))
    if not limit.is_file() or not used.is_file():
        return None
    most = limit.read_text(encoding="ascii").strip()
    return None if most == "max" else max(int(most) - int(used.read_text(encoding="ascii")), 0)


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, what: str) -> Tensor:
    """Memory for a tensor that is about to be filled.

    Raises:
        Unsupported: there is not enough; says which card, how much was asked for and is free.
    """
    try:
        with torch.inference_mode(False):  # else it could not be written outside of that mode
            return torch.empty(shape, dtype=dtype, device=device)
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        asked = torch.empty(shape, dtype=dtype, device="meta").nbytes
        raise Unsupported(f"{no_room(device, asked, what)} ({type(error).__name__})") from error


def no_room(device: torch.device, asked: int, what: str) -> str:
    """The words of a refusal."""
    free = free_bytes(device)
    left = "an unknown amount" if free is None else gib(free)
    return (
        f"card {device} has no room for {what}: {gib(asked)} are asked for, {left} is free; would "
        f"fit: a card with {gib(asked)} more than it had, further cards, or fewer experts here "
        "(Placement(partition='fit'))"
    )


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return "can't allocate memory" in str(error)  # torch's allocator of host memory
