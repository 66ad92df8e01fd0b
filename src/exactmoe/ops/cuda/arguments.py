"""The experts kernel's arguments, as kernels/cuda/experts.cuh declares them."""

import ctypes

from torch import Tensor

from exactmoe.formats.rows import Rows
from exactmoe.ops.cuda.prepare import CudaWeight


class _Projection(ctypes.Structure):
    _fields_ = [
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("code_stride", ctypes.c_uint64),
        ("scale_stride", ctypes.c_uint64),
        ("factors", ctypes.c_void_p),
        ("on_fp8", ctypes.c_void_p),
    ]


class _Rows(ctypes.Structure):
    _fields_ = [
        ("values", ctypes.c_void_p),
        ("wide", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
    ]


class Arguments(ctypes.Structure):
    """Given to the kernel by value."""

    _fields_ = [
        ("gate", _Projection),
        ("up", _Projection),
        ("down", _Projection),
        ("offsets", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("x", _Rows),
        ("h", _Rows),
        ("out", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("counters", ctypes.c_void_p),
        ("num_experts", ctypes.c_uint32),
        ("hidden", ctypes.c_uint32),
        ("inner", ctypes.c_uint32),
        ("top_k", ctypes.c_uint32),
        ("phases", ctypes.c_uint32),
        ("divide", ctypes.c_uint32),
        ("limit", ctypes.c_float),
    ]


def projection(weight: CudaWeight | None) -> _Projection:
    """Addresses, and bytes from expert to expert; of a phase that is not launched nulls."""
    if weight is None:
        return _Projection()
    codes, scales = weight.codes, weight.scales
    return _Projection(
        codes.data_ptr(),
        scales.data_ptr(),
        codes.stride(0),
        scales.stride(0),
        weight.factors.data_ptr(),
        weight.on_fp8.data_ptr(),
    )


def token_rows(rows: Rows | None) -> _Rows:
    """Addresses of packed rows or of a call's tokens; nulls of what they don't have."""
    if rows is None:
        return _Rows()
    return _Rows(_address(rows.values), _address(wide_of(rows)), _address(rows.scales))


def wide_of(rows: Rows) -> Tensor | None:
    """The bf16 values of packed rows of class `a8`; of others there are none."""
    return rows.packed if rows.scales is not None and isinstance(rows.packed, Tensor) else None


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
