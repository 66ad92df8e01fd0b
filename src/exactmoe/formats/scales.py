"""E4M3 and E8M0: the block scales of NVFP4 and MXFP4, as bytes.

Sources: OCP OFP8 v1.0; OCP Microscaling v1.0, section 5.4.
"""

import torch
from torch import Tensor

E4M3_MAX = 448.0
E4M3_NAN = 0x7F
E8M0_NAN = 0xFF
E8M0_BIAS = 127


def _e4m3_value(byte: int) -> float:
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    if byte & 0x7F == E4M3_NAN:
        return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


E4M3_VALUES = torch.tensor([_e4m3_value(b) for b in range(256)], dtype=torch.float32, device="cpu")


def decode_e4m3(codes: Tensor) -> Tensor:
    """E4M3 bytes uint8 to float32, exact; 0x7F and 0xFF are NaN."""
    return E4M3_VALUES.to(codes.device)[codes.long()]


def encode_e4m3(values: Tensor) -> Tensor:
    """Float32 to E4M3 bytes uint8: nearest, ties to even, saturating at 448.

    NaN becomes 0x7F, -0 is kept.
    """
    codes = values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(values.isnan(), torch.full_like(codes, E4M3_NAN), codes)


def power_of_two(exponents: Tensor) -> Tensor:
    """2^exponent as float32, exponents integer: subnormal below -126, 0 below -149, Inf above 127.

    Made from bits: a thread that flushes subnormals must not change a scale.
    """
    exponents = exponents.int()
    normal = (exponents.clamp(-126, 128) + 127) << 23
    subnormal = torch.ones_like(exponents) << (exponents.clamp(-149, -127) + 149)
    subnormal = torch.where(exponents < -149, torch.zeros_like(subnormal), subnormal)
    return torch.where(exponents < -126, subnormal, normal).view(torch.float32)


def decode_e8m0(codes: Tensor) -> Tensor:
    """E8M0 bytes uint8 to float32, 2^(byte - 127), exact.

    Byte 0 is the subnormal 2^-127, byte 255 is NaN.
    """
    values = power_of_two(codes.int() - E8M0_BIAS)
    return torch.where(codes == E8M0_NAN, torch.full_like(values, float("nan")), values)


def floor_log2(values: Tensor) -> Tensor:
    """floor(log2(value)) of positive finite float32 values, int32, exact, subnormals included."""
    _, exponent = torch.frexp(values.double())
    return exponent.int() - 1
