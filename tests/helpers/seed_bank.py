"""The first seed system's own case: 8 experts, top-6, weights that differ by expert and projection
so that a wrong pointer shows.
"""

import torch
from torch import Tensor

from exactmoe import ExpertBank, PackedWeight

MULTIPLIER = 2654435761 - 2**32


def seed_bank(hidden: int, inner: int) -> ExpertBank:
    """The first seed's bytes, made to differ by expert and projection as its later gates asked."""

    def weight(number: int, rows: int, columns: int) -> PackedWeight:
        # Words of 32 bits hold the eight that are taken: 2654435761 is MULTIPLIER beyond them.
        index = torch.arange(8 * rows * columns // 2, dtype=torch.int32).view(8, rows, -1)
        expert = torch.arange(8)[:, None, None]
        codes = (index + 1000003 * number) * MULTIPLIER >> 16 & 0xFF
        blocks = torch.arange(8 * rows * columns // 16).view(8, rows, -1)
        scales = 0x20 + (blocks + 7 * number + 3 * expert) % 32
        powers = (torch.arange(8) * 3 + number) % 7 - 3
        return PackedWeight(
            "nvfp4",
            codes.to(torch.uint8),
            scales.to(torch.uint8),
            torch.ldexp(torch.ones(8), powers),
        )

    return ExpertBank(weight(0, inner, hidden), weight(2, inner, hidden), weight(1, hidden, inner))


def seed_call(tokens: int, hidden: int) -> tuple[Tensor, Tensor, Tensor]:
    """Its x bfloat16 [T, H], ids int32 and weights [T, 6]."""
    x = (torch.arange(tokens * hidden) * 11 % 251 - 125).view(tokens, hidden) / 64
    slot = torch.arange(tokens * 6)
    ids = ((slot // 6 * 7 + slot % 6 * 3) % 8).int().view(tokens, 6)
    weights = torch.where(slot % 5 == 0, -0.0, (slot % 13 - 5) / 8).float().view(tokens, 6)
    return x.bfloat16(), ids, weights
