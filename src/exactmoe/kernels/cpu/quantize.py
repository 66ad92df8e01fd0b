"""quantize: `a8` activations, e4m3 values and a scale per 128 (contract section 3)."""

import numpy as np

from exactmoe.kernels.cpu.compile import device, kernel_jit
from exactmoe.kernels.cpu.functions import F32_NAN
from exactmoe.kernels.cpu.intrinsics import bits32, float32_of, next_piece

GROUP = 128
PIECE_ROWS = 8
_FLOOR, _INVERSE_MAX = np.float32(1e-4), np.float32(1 / 448)
_MAX, _ZERO = np.float32(448.0), np.float32(0.0)
_SMALLEST_NORMAL = np.float32(2.0**-6)
_ALIGN = np.float32(2.0**14)  # float32 have a spacing of 2^-9 there, as e4m3 has below 2^-6
_ABS, _INF = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)


@device
def e4m3(value):
    """The nearest e4m3 of a finite float32, ties to even, saturating at 448; a zero is +0."""
    bits = bits32(value)
    magnitude_bits = bits & _ABS
    magnitude = float32_of(magnitude_bits)
    # Three bits of mantissa stay: round to nearest even at bit 20.
    odd = np.uint32(np.uint32(magnitude_bits >> np.uint32(20)) & np.uint32(1))
    rounded_bits = np.uint32(np.uint32(magnitude_bits + np.uint32(0x7FFFF)) + odd)
    normal = float32_of(np.uint32(rounded_bits & np.uint32(0xFFF00000)))
    normal = _MAX if normal > _MAX else normal
    small = (magnitude + _ALIGN) - _ALIGN
    rounded = small if magnitude < _SMALLEST_NORMAL else normal
    signed = float32_of(np.uint32(bits32(rounded) | (bits & np.uint32(0x80000000))))
    return _ZERO if rounded == _ZERO else signed


@device
def _largest(bits):
    """The largest magnitude of float32 given as bits uint32 [GROUP], as bits."""
    largest = np.uint32(0)
    for k in range(GROUP):
        magnitude = np.uint32(bits[k] & _ABS)
        largest = magnitude if magnitude > largest else largest
    return largest


@device
def _quantize_group(values, out):
    """One group of 128: float32 [128] -> values of its codes float32 [128]; gives the scale."""
    largest = _largest(values.view(np.uint32))
    if largest >= _INF:
        out[:] = float32_of(F32_NAN)
        return np.float32(1.0)
    t = bits32(max(float32_of(largest), _FLOOR) * _INVERSE_MAX)
    exponent = np.uint32(t >> np.uint32(23)) + np.uint32((t & np.uint32(0x7FFFFF)) != np.uint32(0))
    # x / 2^e is x * 2^-e: the reciprocal is exact and normal for every e from -22 to 120.
    inverse = float32_of(np.uint32((np.uint32(254) - exponent) << np.uint32(23)))
    for k in range(GROUP):
        out[k] = e4m3(values[k] * inverse)
    return float32_of(np.uint32(exponent << np.uint32(23)))


@kernel_jit
def quantize(values, out, scales, counter):
    """values float32 [T, K] -> out float32 [T, K], scales float32 [T, K // 128]."""
    num_rows, num_groups = scales.shape
    while True:
        first = next_piece(counter) * PIECE_ROWS
        if first >= num_rows:
            break
        for row in range(first, min(first + PIECE_ROWS, num_rows)):
            for group in range(num_groups):
                start, end = group * GROUP, (group + 1) * GROUP
                scale = _quantize_group(values[row, start:end], out[row, start:end])
                scales[row, group] = scale
