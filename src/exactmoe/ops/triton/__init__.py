"""Launchers of the Triton kernels: one public function a file, torch tensors in and out."""

from exactmoe.errors import Unsupported

try:
    import triton as _  # noqa: F401 - only asked whether it is there
except ModuleNotFoundError as error:
    raise Unsupported("the package triton is not installed: this path needs it") from error
