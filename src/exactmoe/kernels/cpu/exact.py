"""Where a multiply and an add may be one fma: rows whose products with any weight are exact.

An operand of a packed weight is a multiple of 2^-97 and at most 2^12 (NVFP4: 2^-10 and 2688; MXFP4:
96 binades below 6; FP8: 2^-9 and 448), with at most 6 significant bits; a bf16 weight counts if
every value is zero or from 2^-48 to 2^48. x has at most 8 significant bits. If every x is zero or
from 2^-40 to 2^64, each product is a multiple of 2^-144 (bf16: 2^-102) and below 2^113, with at
most 16 significant bits: exact in float32, so rounding it changes nothing. NaN and Inf are outside
of the range.
"""

import numpy as np

from exactmoe.kernels.cpu.compile import device

WEIGHT_EXPONENTS = (-48, 48)  # of bf16 weights
_ABS = np.uint32(0x7FFFFFFF)
_LOWEST = np.uint32((127 - 40) << 23)
_SPAN = np.uint32(((127 + 64) << 23) - ((127 - 40) << 23))


@device
def exact_rows(values, exact):
    """Fill exact bool [T]: whether every product with row t of values float32 [T, K] is exact."""
    bits = values.view(np.uint32)
    for row in range(bits.shape[0]):
        outside = np.uint32(0)
        for k in range(bits.shape[1]):
            magnitude = np.uint32(bits[row, k] & _ABS)
            wrong = (np.uint32(magnitude - _LOWEST) > _SPAN) & (magnitude != np.uint32(0))
            outside = np.uint32(outside | np.uint32(wrong))
        exact[row] = outside == np.uint32(0)
