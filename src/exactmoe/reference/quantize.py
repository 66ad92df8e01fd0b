"""FP8 activations of class `a8`: e4m3 codes and one power-of-two scale per token per 128 (contract
section 3).
"""

import torch
from torch import Tensor

from exactmoe.formats.scales import E4M3_NAN, encode_e4m3, power_of_two
from exactmoe.reference.dot import SCALE_GROUP
from exactmoe.reference.functions import f32

_FLOOR = 1e-4


def quantize(values: Tensor) -> tuple[Tensor, Tensor]:
    """Float32 or bfloat16 [T, K], K a multiple of 128 -> codes uint8 [T, K], scales float32 [T, K
    // 128].

    t = max(amax, 1e-4) x f32(1/448); scale = 2^e, e the exponent of t, plus 1 if any mantissa bit
    is set; code = nearest
    e4m3 of x / scale, saturating, a zero always 0x00. A group with a NaN or Inf becomes 128 codes
    0x7F, scale 1.
    """
    groups = values.float().unflatten(-1, (-1, SCALE_GROUP))
    finite = torch.isfinite(groups).all(-1)
    amax = torch.where(finite, groups.abs().amax(-1), groups.new_zeros(finite.shape))
    t = torch.maximum(amax, f32(_FLOOR)) * f32(1 / 448)
    bits = t.view(torch.int32)
    exponent = (bits >> 23) - 127 + (bits & 0x7FFFFF != 0).int()
    scales = torch.where(finite, power_of_two(exponent), groups.new_ones(finite.shape))
    codes = encode_e4m3(groups / scales[..., None])
    codes = torch.where(codes & 0x7F == 0, torch.zeros_like(codes), codes)
    codes = torch.where(finite[..., None], codes, torch.full_like(codes, E4M3_NAN))
    return codes.flatten(-2), scales
