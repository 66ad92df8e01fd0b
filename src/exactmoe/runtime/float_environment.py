"""The floating-point environment of the calling thread: set before a CPU computes, put back after.

`torch.set_flush_denormal` or a library may have left a thread that flushes subnormals or rounds in
another direction; the contract asks for round to nearest with subnormals kept.
"""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from exactmoe.errors import Unsupported

_ENVIRONMENT_BYTES = 256  # larger than any fenv_t
_DEFAULT = ctypes.c_void_p(-1)  # FE_DFL_ENV of glibc and musl


@cache
def _math_library() -> Any:
    if sys.platform != "linux":
        raise Unsupported(
            f"the CPU backend sets the floating-point environment of Linux; this is {sys.platform}"
        )
    # PyDLL keeps the GIL: these calls take nanoseconds.
    return ctypes.PyDLL(None)


@contextmanager
def default_float_environment() -> Iterator[None]:
    """Inside: the default environment, on this thread. After: what was found."""
    library = _math_library()
    found = ctypes.create_string_buffer(_ENVIRONMENT_BYTES)
    library.fegetenv(found)
    library.fesetenv(_DEFAULT)
    try:
        yield
    finally:
        library.fesetenv(found)
