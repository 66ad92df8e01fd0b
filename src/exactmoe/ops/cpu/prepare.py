"""prepare: what the CPU kernels need to read a packed weight where it lies."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from exactmoe.errors import Unsupported
from exactmoe.formats import BLOCK, PackedWeight, exponent_range
from exactmoe.formats.e2m1 import VALUES
from exactmoe.formats.scales import E4M3_VALUES, E8M0_BIAS
from exactmoe.kernels.cpu.dot import TOKENS, tile_address
from exactmoe.kernels.cpu.exact import WEIGHT_EXPONENTS

Integers = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float32]]


def _powers_of_two(exponents: Integers) -> Floats:
    """2^exponent as float32, by bits: a caller that flushes subnormals must not change a weight."""
    normal = (exponents + 127) << 23
    subnormal = np.int64(1) << (exponents + 149).clip(0)
    bits = np.where(exponents >= -126, normal, np.where(exponents >= -149, subnormal, 0))
    return bits.astype(np.uint32).view(np.float32)


def _tables(scales: Floats) -> Floats:
    """Float32 [n, 16]: the values of the 16 codes under each of n scales, exact.

    Each row is one cache line: a row that crossed two took a third more time.
    """
    codes = len(VALUES)
    room = np.empty((len(scales) + 1) * codes, np.float32)
    start = -room.ctypes.data % 64 // room.itemsize
    rows = room[start : start + len(scales) * codes].reshape(-1, codes)
    np.multiply(scales[:, None], VALUES.numpy(), out=rows)
    return rows


_E4M3 = _tables(E4M3_VALUES.numpy())
# 2^d for d = -510 ... 255 with d > 0 read as 0: only blocks of zeros lie above p, and their zeros
# must not meet an Inf. Below 2^-96 too: there a caller that flushes subnormals does no harm.
_LOWEST = -510
_POWERS = _tables(_powers_of_two(np.arange(_LOWEST, 256).clip(max=0)))
_UNUSED = np.zeros(1, np.float32)


@dataclass(frozen=True, eq=False)
class CpuWeight:
    """A packed weight as the kernels read it (kernels/cpu/project.py): addresses, not copies.

    Attributes:
        weight: the packed weight, kept so that the addresses stay valid.
        experts: int64 [E, 3]: addresses of codes, block scales and the table of operands.
        factors: float32 [E]: global scales; 2^p for MXFP4; 1 for BF16 and FP8.
        layout: int64 [12].
    """

    weight: PackedWeight
    experts: Integers
    factors: Floats
    layout: Integers

    @property
    def arrays(self) -> tuple[Any, Any, Any]:
        """The three arrays that a kernel takes."""
        return self.experts, self.factors, self.layout


def prepare(weight: PackedWeight) -> CpuWeight:
    """Addresses and epilogue factors of a weight [E, N, K] on the CPU.

    Raises:
        Unsupported: another device, or rows that are not contiguous.
    """
    _require_contiguous_rows("codes", weight.codes)
    experts = np.zeros((weight.num_experts, 3), np.int64)
    index = np.arange(weight.num_experts)
    codes = weight.codes
    experts[:, 0] = codes.data_ptr() + index * (codes.stride(0) * codes.element_size())
    experts[:, 1] = experts[:, 2] = _UNUSED.ctypes.data
    factors = np.ones(weight.num_experts, np.float32)
    scale_row_bytes = 0
    if weight.scales is not None:
        _require_contiguous_rows("scales", weight.scales)
        size = weight.scales.element_size()
        experts[:, 1] = weight.scales.data_ptr() + index * (weight.scales.stride(0) * size)
        scale_row_bytes = weight.scales.stride(1) * size
    if weight.format == "nvfp4":
        experts[:, 2] = _E4M3.ctypes.data
    elif weight.format == "mxfp4":
        _, high = exponent_range(weight)
        # Byte b of an expert with largest exponent p stands for 2^(b - 127 - p).
        experts[:, 2] = _POWERS.ctypes.data - _POWERS.strides[0] * (
            high.numpy().astype(np.int64) + E8M0_BIAS + _LOWEST
        )
        factors = _powers_of_two(high.numpy().astype(np.int64))
    if weight.global_scale is not None:
        factors = weight.global_scale.contiguous().numpy()
    layout = np.array(
        [
            weight.rows,
            weight.columns,
            codes.stride(1) * codes.element_size(),
            scale_row_bytes,
            BLOCK["fp8"] if weight.format == "fp8" else 1,
            weight.global_scale_op == "divide" and weight.global_scale is not None,
            *(tile_address(weight.format, tokens) for tokens in TOKENS),
            *(tile_address(weight.format, tokens, _exact(weight)) for tokens in TOKENS),
        ],
        np.int64,
    )
    return CpuWeight(weight, experts, factors, layout)


def _exact(weight: PackedWeight) -> bool:
    """Whether kernels/cpu/exact.py covers every operand of this weight."""
    if weight.format != "bf16":
        return True
    low, high = (2.0**exponent for exponent in WEIGHT_EXPONENTS)
    magnitudes = (expert.abs() for expert in weight.codes)
    return all(bool(((m == 0) | ((m >= low) & (m <= high))).all()) for m in magnitudes)


def _require_contiguous_rows(name: str, tensor: Tensor) -> None:
    if tensor.device.type != "cpu" or (tensor.stride(2) != 1 and tensor.shape[2] > 1):
        raise Unsupported(
            f"{name} are on {tensor.device} with strides {tensor.stride()}; "
            "allowed: on the CPU, the last stride 1"
        )
