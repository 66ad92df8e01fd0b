"""Which matrix units an expert may use in class `a8` without losing a bit (contract section 3).

E4M3 holds e2m1 x 2^s exactly for s = -8 ... 6 and for no other s: 14 binades from end to end. So
an FP4 expert's projection runs on the fp8 units when every block scale over a non-zero code is a
power of two and, in every row, each 128-wide piece spans at most 14 binades over those blocks.
Decided from the bytes of that expert and projection alone.
"""

import torch
from torch import Tensor

from exactmoe.errors import ConfigError
from exactmoe.formats.packed import BLOCK, PackedWeight, blocks_in_use
from exactmoe.formats.scales import E8M0_BIAS, decode_e4m3, floor_log2

MAX_FP8_BINADES = 14
PIECE = 128


# What `piece_spans` gives where a block scale over a non-zero code is no power of two.
NO_POWERS = -1
# Experts are looked at in pieces of about this many bytes of codes: what is computed takes several
# times as much.
_PIECE_BYTES = 32 << 20


def fp8_exact(weight: PackedWeight) -> Tensor:
    """Bool [E]: True where the fp8 units multiply the same values that the bf16 units do.

    An FP8 weight's operands are e4m3 themselves.
    """
    if weight.format in ("fp8", "bf16"):
        exact = weight.format == "fp8"
        return torch.full((weight.num_experts,), exact, dtype=torch.bool, device=weight.device)
    spans = piece_spans(weight)
    return (spans >= 0) & (spans <= MAX_FP8_BINADES)


def piece_spans(weight: PackedWeight) -> Tensor:
    """Int32 [E]: of each expert of an FP4 weight, the most binades that the block scales of one
    128-wide piece of a row span, over blocks with a non-zero code; 0 where there are none.

    NO_POWERS where a scale over a non-zero code is no power of two.

    Raises:
        ConfigError: the weight has no FP4 codes.
    """
    if weight.scales is None or weight.format == "fp8":
        raise ConfigError(f"format is {weight.format!r}; allowed: nvfp4, mxfp4")
    experts = weight.num_experts
    step = max(1, _PIECE_BYTES * experts // weight.codes.nbytes)
    pieces = [slice(start, start + step) for start in range(0, experts, step)]
    return torch.cat([_spans(weight.format, weight.codes[p], weight.scales[p]) for p in pieces])


def _spans(format: str, codes: Tensor, scales: Tensor) -> Tensor:
    """As `piece_spans`, of codes and scales of some experts."""
    counted = blocks_in_use(codes, BLOCK[format])
    powers = torch.ones(codes.shape[0], dtype=torch.bool, device=codes.device)
    if format == "mxfp4":
        exponents = scales.int() - E8M0_BIAS
    else:
        values = decode_e4m3(scales)
        exponents = floor_log2(torch.where(values > 0, values, torch.ones_like(values)))
        # Zero is no power of two: a zero scale over a non-zero code decides for bf16.
        equal = torch.ldexp(torch.ones_like(values), exponents) == values
        powers = (equal | ~counted).all(-1).all(-1)
    per_piece = PIECE // BLOCK[format]
    padding = -exponents.shape[-1] % per_piece
    exponents = torch.nn.functional.pad(exponents, (0, padding)).unflatten(-1, (-1, per_piece))
    counted = torch.nn.functional.pad(counted, (0, padding)).unflatten(-1, (-1, per_piece))
    high = torch.where(counted, exponents, torch.full_like(exponents, -1000)).amax(-1)
    low = torch.where(counted, exponents, torch.full_like(exponents, 1000)).amin(-1)
    spans = (high - low).clamp(min=0).amax((-2, -1))
    return torch.where(powers, spans, torch.full_like(spans, NO_POWERS)).int()
