"""Dots one float32 operation at a time, and a fused multiply-add by rational arithmetic."""

import math
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

BIG = 2.0**24  # BIG + 1 rounds back to BIG in float32; BIG + 2 does not


def by_hand(columns: int, terms: dict[int, float]) -> tuple[Tensor, Tensor]:
    """w and x of one row whose products are the terms, by k."""
    w, x = torch.zeros(1, columns), torch.zeros(1, columns)
    for k, value in terms.items():
        w[0, k], x[0, k] = value, 1.0
    return w, x


def chain(w: np.ndarray, x: np.ndarray) -> np.float32:
    """One chain: 16 lanes, then the tree."""
    lanes = [np.float32(0)] * 16
    for k in range(len(w)):
        lanes[k % 16] = np.float32(lanes[k % 16] + np.float32(w[k] * x[k]))
    for step in (8, 4, 2, 1):
        lanes = [np.float32(lanes[j] + lanes[j + step]) for j in range(step)]
    return lanes[0]


def nearest_f32(exact: Fraction) -> float:
    """The float32 nearest to a Fraction, ties to even, by integer arithmetic alone."""
    if exact == 0:
        return 0.0
    exponent = exact.numerator.bit_length() - exact.denominator.bit_length()
    exponent -= abs(exact) < Fraction(2) ** exponent
    step = Fraction(2) ** (max(exponent, -126) - 23)
    rounded = round(exact / step) * step
    return math.copysign(math.inf, rounded) if abs(rounded) >= 2**128 else float(rounded)


def block_chains(w: np.ndarray, x: np.ndarray, scales: np.ndarray) -> np.float32:
    """FP8: acc = fma(chain of 128, block scale, acc) over one row and one token, from +0."""
    accumulator = 0.0
    for block, scale in enumerate(scales):
        part = slice(128 * block, 128 * block + 128)
        product = Fraction(float(chain(w[part], x[part]))) * Fraction(float(scale))
        accumulator = nearest_f32(product + Fraction(accumulator))
    return np.float32(accumulator)
