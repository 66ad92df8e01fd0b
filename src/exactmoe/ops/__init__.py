"""Host side of the ops: one set of them a backend, found by its name.

What a path needs is imported when it is first asked for: triton and CUDA's bindings may be absent.
"""

import importlib
from functools import cache

from exactmoe.ops.path import (
    CANONICAL,
    DECODED,
    DEVICE,
    FRAGMENT,
    FRAGMENT_FP8,
    PACKED,
    PACKED_A8,
    Path,
    Storage,
    gpu_storages,
)
from exactmoe.ops.timed import timed

_PATHS = {
    "cpu": ("exactmoe.ops.cpu_path", "CpuPath"),
    "reference": ("exactmoe.ops.reference_path", "ReferencePath"),
    "triton": ("exactmoe.ops.triton_path", "TritonPath"),
    "cuda": ("exactmoe.ops.cuda_path", "CudaPath"),
    "cuda_a8": ("exactmoe.ops.cuda_path", "CudaA8Path"),
    "cuda_a8_bf16": ("exactmoe.ops.cuda_path", "CudaA8Bf16Path"),
    "cuda_a8_fp8": ("exactmoe.ops.cuda_path", "CudaA8Fp8Path"),
}


@cache
def path(name: str) -> Path:
    """The path that `Plan.path` names."""
    module, kind = _PATHS[name]
    return getattr(importlib.import_module(module), kind)()  # type: ignore[no-any-return]


__all__ = [
    "CANONICAL",
    "DECODED",
    "DEVICE",
    "FRAGMENT",
    "FRAGMENT_FP8",
    "PACKED",
    "PACKED_A8",
    "Path",
    "Storage",
    "gpu_storages",
    "path",
    "timed",
]
