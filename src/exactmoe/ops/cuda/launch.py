"""Queueing of the sm_90 kernels."""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from exactmoe import env
from exactmoe.kernels.cuda.compile import Kernel, pointer


def queue(
    what: Kernel, on: Tensor, grid: tuple[int, int, int], arguments: Sequence[Any], early: bool
) -> None:
    """Queue a kernel on the current stream of the tensor's device.

    Args:
        grid: blocks in two directions, and threads of a block.
        early: it may start before the kernel before has ended, unless EXACTMOE_EARLY is off.
    """
    device = on.device.index
    stream = torch.cuda.current_stream(device).cuda_stream
    what.launch(device, stream, grid, arguments, early and env.read("EXACTMOE_EARLY"))


def pointers(*tensors: Tensor | None) -> list[Any]:
    """Addresses as arguments; None is a null pointer."""
    return [ctypes.c_void_p(0) if tensor is None else pointer(tensor) for tensor in tensors]


def numbers(*values: int) -> list[Any]:
    """32-bit unsigned arguments."""
    return [ctypes.c_uint32(value) for value in values]


@cache
def processors(device: int) -> int:
    """SMs of a device."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
