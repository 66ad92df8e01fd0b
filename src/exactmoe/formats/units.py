"""Which matrix units an expert may use in class `a8` without losing a bit (contract section 3).

E4M3 holds e2m1 x 2^s exactly for s = -8 ... 6 and for no other s: 14 binades from end to end. So
an FP4 expert's projection runs on the fp8 units when every block scale over a non-zero code is a
power of two and, in every row, each 128-wide piece spans at most 14 binades over those blocks.
Decided from the bytes of that expert and projection alone.
"""

import torch
from torch import Tensor

from exactmoe.formats.packed import BLOCK, PackedWeight, nonzero_blocks
from exactmoe.formats.scales import E8M0_BIAS, decode_e4m3, floor_log2

MAX_FP8_BINADES = 14
PIECE = 128


def fp8_exact(weight: PackedWeight) -> Tensor:
    """Bool [E]: True where the fp8 units multiply the same values that the bf16 units do.

    An FP8 weight's operands are e4m3 themselves.
    """
    if weight.format == "fp8":
        return torch.ones(weight.num_experts, dtype=torch.bool, device=weight.device)
    if weight.scales is None:
        return torch.zeros(weight.num_experts, dtype=torch.bool, device=weight.device)
    counted = nonzero_blocks(weight)
    exact = torch.ones(weight.num_experts, dtype=torch.bool, device=weight.device)
    if weight.format == "mxfp4":
        exponents = weight.scales.int() - E8M0_BIAS
    else:
        scales = decode_e4m3(weight.scales)
        exponents = floor_log2(torch.where(scales > 0, scales, torch.ones_like(scales)))
        # Zero is no power of two: a zero scale over a non-zero code decides for bf16.
        powers = torch.ldexp(torch.ones_like(scales), exponents) == scales
        exact &= (powers | ~counted).all(-1).all(-1)
    per_piece = PIECE // BLOCK[weight.format]
    padding = -exponents.shape[-1] % per_piece
    exponents = torch.nn.functional.pad(exponents, (0, padding)).unflatten(-1, (-1, per_piece))
    counted = torch.nn.functional.pad(counted, (0, padding)).unflatten(-1, (-1, per_piece))
    high = torch.where(counted, exponents, torch.full_like(exponents, -1000)).amax(-1)
    low = torch.where(counted, exponents, torch.full_like(exponents, 1000)).amin(-1)
    return exact & (high - low <= MAX_FP8_BINADES).all(-1).all(-1)
