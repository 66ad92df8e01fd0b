"""Devices of this process: names resolved once, and the device that a call runs on."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from exactmoe.errors import ConfigError, Unsupported


def resolve(name: str | torch.device) -> torch.device:
    """The device of a name; "cuda" is the current one now, whatever is current later.

    Raises:
        Unsupported: this torch is not built for GPUs, or sees none.
        ConfigError: there is no card of that number.
    """
    device = torch.device(name)
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise Unsupported(f"card is '{name}'; torch {torch.__version__} sees no GPU; allowed: cpu")
    count = torch.cuda.device_count()
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= count:
        raise ConfigError(f"card is '{name}'; allowed: cuda:0 to cuda:{count - 1}")
    return torch.device("cuda", index)


def current(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU the current one, for launches and allocations, and puts back what was current."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def capturing(device: torch.device) -> bool:
    """Whether the device's current stream records a CUDA graph."""
    if device.type != "cuda" or not torch.cuda.is_initialized():
        return False
    if device.index == torch.cuda.current_device():
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


@contextmanager
def allocating_beside_a_capture() -> Iterator[None]:
    """Inside, this thread may allocate on a GPU whose current stream is not part of the graph that
    is being captured; torch itself allows it on streams that are. A graph keeps the addresses, and
    the memory must outlive it.

    Raises:
        Unsupported: cuda-bindings is not installed.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise Unsupported(
            f"a graph over two GPUs needs cuda-bindings ({error}); pip install cuda-bindings"
        ) from error
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    status, before = driver.cuThreadExchangeStreamCaptureMode(relaxed)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise Unsupported(f"the capture mode of this thread cannot be changed: {status.name}")
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(before)
