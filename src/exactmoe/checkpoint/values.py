"""From a stored tensor to the dtype that a weight keeps: bytes are taken over, never cast."""

import torch
from torch import Tensor

from exactmoe.errors import CheckpointError
from exactmoe.formats.scales import decode_e8m0

_MANTISSA, _SIGN_AND_EXPONENT = 0x7FFFFF, 23
# 2^-127, which float32 holds as a subnormal: E8M0 byte 0.
_SMALLEST = 0x400000


def converted(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """What `stored` is in `dtype`, exactly; a view where the bytes are the same.

    Bytes of one-byte dtypes stay bytes; float32 scales become E8M0 bytes; E8M0 and bfloat16 scales
    become float32.

    Raises:
        CheckpointError: float32 scales that are not powers of two, or any other pair of dtypes.
    """
    if stored.dtype == dtype:
        return stored
    if dtype == torch.uint8 and stored.dtype == torch.float32:
        return _e8m0_bytes(stored)
    if dtype == torch.uint8 and stored.element_size() == 1:
        return stored.view(torch.uint8)
    if dtype == torch.float32 and stored.dtype == torch.float8_e8m0fnu:
        return decode_e8m0(stored.view(torch.uint8))
    if dtype == torch.float32 and stored.dtype == torch.bfloat16:
        return stored.float()
    raise CheckpointError(f"it reads as {stored.dtype}; the plan asks for {dtype}")


def _e8m0_bytes(scales: Tensor) -> Tensor:
    """Float32 scales [N, K // 32], powers of two from 2^-127 to 2^127, to their E8M0 bytes."""
    bits = scales.view(torch.int32)
    exponents = bits >> _SIGN_AND_EXPONENT  # negative where the sign bit is set
    good = (bits & _MANTISSA == 0) & (exponents >= 1) & (exponents <= 254)
    good |= bits == _SMALLEST
    if not bool(good.all()):
        row, block = (int(i) for i in (~good).nonzero()[0])
        raise CheckpointError(
            f"block scale {float(scales[row, block])} at row {row}, block {block}; "
            "allowed in float32: powers of two from 2^-127 to 2^127, as E8M0 holds them"
        )
    return exponents.to(torch.uint8)
