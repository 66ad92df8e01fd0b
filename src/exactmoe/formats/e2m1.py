"""E2M1: the four-bit float of NVFP4 and MXFP4 (OCP Microscaling v1.0, section 5.3.3).

Code bits: sign, two of exponent, one of mantissa. Magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6; code 8 is
-0. Two codes share a byte: the low nibble is the even (first) column.
"""

import torch
from torch import Tensor

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MAX = 6.0
VALUES = torch.tensor(MAGNITUDES + tuple(-m for m in MAGNITUDES), dtype=torch.float32, device="cpu")

# Halfway points between neighbours. A tie goes to the even code: down where the lower code is even.
_MIDPOINTS = tuple((a + b) / 2 for a, b in zip(MAGNITUDES, MAGNITUDES[1:], strict=False))


def pack(codes: Tensor) -> Tensor:
    """Codes uint8 [..., K] (0..15) to bytes uint8 [..., K // 2]; K even."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """Bytes uint8 [..., K // 2] to codes uint8 [..., K]."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def decode(codes: Tensor) -> Tensor:
    """Codes uint8 to their values, float32, exact; code 8 gives -0."""
    return VALUES.to(codes.device)[codes.long()]


def encode(values: Tensor) -> Tensor:
    """Float32 values to codes uint8: nearest, ties to the even code, saturating at 6; -0 stays."""
    magnitude = values.abs()
    code = torch.zeros_like(values, dtype=torch.uint8)
    for lower_code, midpoint in enumerate(_MIDPOINTS):
        above = magnitude > midpoint if lower_code % 2 == 0 else magnitude >= midpoint
        code += above.to(torch.uint8)
    return code | (torch.signbit(values).to(torch.uint8) << 3)
