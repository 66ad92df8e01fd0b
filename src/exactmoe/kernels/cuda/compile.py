"""Run-time compilation with NVRTC, which comes with torch's CUDA wheels.

IEEE arithmetic: no contraction to fma, subnormals kept, division and square root rounded right.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol

from exactmoe.errors import Unsupported
from exactmoe.kernels.cuda.disk import kept

ARCHITECTURE = "sm_90a"
OPTIONS = (
    f"--gpu-architecture={ARCHITECTURE}",
    "--std=c++17",
    "--fmad=false",
    "--ftz=false",
    "--prec-div=true",
    "--prec-sqrt=true",
)


class Source(Protocol):
    """A kernel that can be compiled; hashable.

    Attributes:
        entry: its name.
        shared_bytes: dynamic shared memory of a block.
    """

    @property
    def entry(self) -> str: ...

    @property
    def shared_bytes(self) -> int: ...

    def text(self) -> str:
        """CUDA C++ without #include."""


def missing() -> str | None:
    """Why nothing can be compiled here; None if it can."""
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        return f"cuda-bindings cannot be imported ({error}); pip install cuda-bindings"
    try:
        nvrtc.nvrtcVersion()
    except RuntimeError as error:
        return f"NVRTC cannot be loaded ({error})"
    return None


def _nvrtc(answer: tuple[Any, ...]) -> Any:
    from cuda.bindings import nvrtc

    if answer[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(f"NVRTC: {answer[0].name}")
    return answer[1] if len(answer) == 2 else answer[1:]


def _driver(answer: tuple[Any, ...]) -> Any:
    from cuda.bindings import driver

    if answer[0] != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"CUDA driver: {answer[0].name}")
    return answer[1] if len(answer) == 2 else answer[1:]


@cache
def cubin(variant: Source) -> bytes:
    """Machine code of a variant, from the cache on disk or compiled; needs NVRTC, not a GPU.

    Raises:
        Unsupported: NVRTC is not there.
    """
    reason = missing()
    if reason is not None:
        raise Unsupported(reason)
    from cuda.bindings import nvrtc

    text, version = variant.text(), _nvrtc(nvrtc.nvrtcVersion())
    return kept(f"{OPTIONS} {version}\n{text}", lambda: _compiled(text))


def _compiled(text: str) -> bytes:
    from cuda.bindings import nvrtc

    program = _nvrtc(nvrtc.nvrtcCreateProgram(text.encode(), b"exactmoe.cu", 0, [], []))
    options = [option.encode() for option in OPTIONS]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = b" " * _nvrtc(nvrtc.nvrtcGetProgramLogSize(program))
        _nvrtc(nvrtc.nvrtcGetProgramLog(program, log))
        raise RuntimeError(f"NVRTC: {status.name}\n{log.decode(errors='replace')}")
    code = b" " * _nvrtc(nvrtc.nvrtcGetCUBINSize(program))
    _nvrtc(nvrtc.nvrtcGetCUBIN(program, code))
    _nvrtc(nvrtc.nvrtcDestroyProgram(program))
    return code


class Kernel:
    """A loaded variant, for every device of the process."""

    def __init__(self, variant: Source) -> None:
        from cuda.bindings import driver

        self.variant = variant
        self._code = cubin(variant)
        # A width may first be met while this thread captures a graph: loading is no part of it.
        relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        mode = _driver(driver.cuThreadExchangeStreamCaptureMode(relaxed))
        try:
            self._library = _driver(driver.cuLibraryLoadData(self._code, [], [], 0, [], [], 0))
            entry = variant.entry.encode()
            self._kernel = _driver(driver.cuLibraryGetKernel(self._library, entry))
        finally:
            _driver(driver.cuThreadExchangeStreamCaptureMode(mode))
        self._function = driver.CUfunction(int(self._kernel))
        self._sized: set[int] = set()

    def _require_shared(self, device: int) -> None:
        from cuda.bindings import driver

        if device not in self._sized:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            handle = _driver(driver.cuDeviceGet(device))
            shared = self.variant.shared_bytes
            _driver(driver.cuKernelSetAttribute(attribute, shared, self._kernel, handle))
            self._sized.add(device)

    def launch(
        self,
        device: int,
        stream: int,
        grid: tuple[int, int, int],
        arguments: Sequence[Any],
        early: bool,
    ) -> None:
        """Queue the kernel; `arguments` are ctypes values, or structures, in the order of its
        signature.

        Args:
            grid: blocks in two directions, and threads of a block.
            early: it may start before the kernel before it has ended (it waits itself for what it
                needs).
        """
        from cuda.bindings import driver

        config = self._config(device, stream, grid)
        if early:
            attribute = driver.CUlaunchAttribute()
            attribute.id = (
                driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            )
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        pairs = [_value_and_kind(argument) for argument in arguments]
        values, kinds = (tuple(part) for part in zip(*pairs, strict=True))
        _driver(driver.cuLaunchKernelEx(config, self._function, (values, kinds), 0))

    def most_clusters(self, device: int, cluster: int, threads: int) -> int:
        """Clusters of `cluster` blocks that the device holds at a time."""
        from cuda.bindings import driver

        config = self._config(device, 0, (cluster, 1, threads))
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size = attribute.value.clusterDim
        size.x, size.y, size.z = cluster, 1, 1
        config.attrs, config.numAttrs = [attribute], 1
        return int(_driver(driver.cuOccupancyMaxActiveClusters(self._function, config)))

    def _config(self, device: int, stream: int, grid: tuple[int, int, int]) -> Any:
        from cuda.bindings import driver

        self._require_shared(device)
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid[0], grid[1], 1
        config.blockDimX, config.blockDimY, config.blockDimZ = grid[2], 1, 1
        config.sharedMemBytes = self.variant.shared_bytes
        config.hStream = stream
        return config


def _value_and_kind(argument: Any) -> tuple[Any, Any]:
    """As the driver's binding takes them; a structure is given by its address, without a kind."""
    if isinstance(argument, ctypes.Structure):
        return argument, None
    return argument.value or 0, type(argument)


@cache
def kernel(variant: Source) -> Kernel:
    """A variant compiled and loaded, once a process."""
    return Kernel(variant)


def pointer(tensor: Any) -> ctypes.c_void_p:
    """A tensor's address as an argument."""
    return ctypes.c_void_p(tensor.data_ptr())
