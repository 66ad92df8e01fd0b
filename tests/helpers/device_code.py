"""Small CUDA kernels of the tests: compiled by NVRTC, loaded and launched through cuda.bindings."""

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor


def _checked(result: tuple[Any, ...]) -> Any:
    """The values of a call of cuda.bindings; RuntimeError with its error otherwise."""
    error, *values = result
    if int(error) != 0:
        raise RuntimeError(f"cuda.bindings: {error!r}")
    return values[0] if len(values) == 1 else values


@cache
def compiled(source: str, architecture: str = "sm_90a") -> bytes:
    """The cubin of a source that includes no header. RuntimeError shows the compiler's log."""
    from cuda.bindings import nvrtc

    program = _checked(nvrtc.nvrtcCreateProgram(source.encode(), b"test.cu", 0, [], []))
    options = [f"--gpu-architecture={architecture}".encode(), b"--fmad=false"]
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(error) != 0:
        log = bytearray(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
        _checked(nvrtc.nvrtcGetProgramLog(program, log))
        raise RuntimeError(f"{error!r}\n{log.decode(errors='replace')}")
    code = bytearray(_checked(nvrtc.nvrtcGetCUBINSize(program)))
    _checked(nvrtc.nvrtcGetCUBIN(program, code))
    return bytes(code)


@dataclass(frozen=True)
class Kernel:
    """One kernel, loaded into the current device's context."""

    handle: Any

    def launch(self, blocks: int, threads: int, arguments: list[Tensor | int]) -> None:
        """On the current stream. Tensors are passed as pointers, numbers as int32."""
        from cuda.bindings import driver

        values = tuple(a.data_ptr() if isinstance(a, Tensor) else a for a in arguments)
        types = tuple(ctypes.c_void_p if isinstance(a, Tensor) else ctypes.c_int for a in arguments)
        stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
        _checked(
            driver.cuLaunchKernel(
                self.handle, blocks, 1, 1, threads, 1, 1, 0, stream, (values, types), 0
            )
        )


@cache
def loaded(source: str, name: str) -> Kernel:
    """A kernel `extern "C"` of a source, for the current card."""
    from cuda.bindings import driver

    torch.cuda.current_stream().synchronize()  # torch's context is the current one now
    library = _checked(driver.cuModuleLoadData(compiled(source)))
    return Kernel(_checked(driver.cuModuleGetFunction(library, name.encode())))
