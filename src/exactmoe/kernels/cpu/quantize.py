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
    kept = (
        magnitude_bits + np.uint32(0x7FFFF) + ((magnitude_bits >> np.uint32(20)) & np.uint32(1))
    ) >> np.uint32(20)
    normal = float32_of(np.uint32(kept << np.uint32(20)))
    normal = _MAX if normal > _MAX else normal
    small = (magnitude + _ALIGN) - _ALIGN
    rounded = small if magnitude < _SMALLEST_NORMAL else normal
    signed = float32_of(np.uint32(bits32(rounded) | (bits & np.uint32(0x80000000))))
    return _ZERO if rounded == _ZERO else signed


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
                start = group * GROUP
                largest = np.uint32(0)
                for k in range(start, start + GROUP):
                    largest = max(largest, bits32(values[row, k]) & _ABS)
                if largest >= _INF:
                    scales[row, group] = np.float32(1.0)
                    for k in range(start, start + GROUP):
                        out[row, k] = float32_of(F32_NAN)
                    continue
                t = bits32(max(float32_of(largest), _FLOOR) * _INVERSE_MAX)
                exponent = t >> np.uint32(23)
                if t & np.uint32(0x7FFFFF):
                    exponent += np.uint32(1)
                scale = float32_of(np.uint32(exponent << np.uint32(23)))
                scales[row, group] = scale
                for k in range(start, start + GROUP):
                    out[row, k] = e4m3(values[row, k] / scale)
