"""Tensor maps: what tensor copies read, encoded by the driver.

Called through ctypes: cuda-bindings before 13.2 keep the 64-byte aligned result in memory that need
not be (NVIDIA/cuda-python pull request 1692).
"""

import ctypes
from functools import cache, lru_cache

from exactmoe.kernels.cuda.dense import CHUNK

_BYTES, _ALIGNMENT = 128, 64
# Of cuda.h, CU_TENSOR_MAP_...: DATA_TYPE_BFLOAT16, INTERLEAVE_NONE, SWIZZLE_128B,
# L2_PROMOTION_L2_256B, FLOAT_OOB_FILL_NONE (zeros).
_BFLOAT16, _NO_INTERLEAVE, _SWIZZLE_128, _PROMOTE_256, _ZEROS = 9, 0, 3, 3, 0


class TensorMap(ctypes.Structure):
    """The 128 opaque bytes of a CUtensorMap, as a kernel's argument."""

    _fields_ = (("words", ctypes.c_uint64 * (_BYTES // 8)),)


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@lru_cache(maxsize=4096)
def rows_map(
    address: int, shape: tuple[int, int], stride: int, box_rows: int, box_chunks: int
) -> TensorMap:
    """Of a bfloat16 matrix, boxes [box_chunks, box_rows, 64] in 128-byte swizzle.

    Args:
        address: of the first element, a multiple of 16.
        shape: rows and columns; columns are a multiple of 64.
        stride: elements from row to row, a multiple of 8.
    """
    rows, columns = shape
    room = ctypes.create_string_buffer(_BYTES + _ALIGNMENT)
    at = -(-ctypes.addressof(room) // _ALIGNMENT) * _ALIGNMENT
    status = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(at),
        _BFLOAT16,
        ctypes.c_uint32(3),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * 3)(CHUNK, rows, columns // CHUNK),
        (ctypes.c_uint64 * 2)(stride * 2, CHUNK * 2),
        (ctypes.c_uint32 * 3)(CHUNK, box_rows, box_chunks),
        (ctypes.c_uint32 * 3)(1, 1, 1),
        _NO_INTERLEAVE,
        _SWIZZLE_128,
        _PROMOTE_256,
        _ZEROS,
    )
    if status != 0:
        raise RuntimeError(
            f"cuTensorMapEncodeTiled: status {status} for {rows} x {columns} at {address:#x}, "
            f"row stride {stride}, boxes of {box_rows} x {box_chunks} chunks"
        )
    return TensorMap.from_buffer_copy(ctypes.string_at(at, _BYTES))
