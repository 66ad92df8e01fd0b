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


def chain(w: np.ndarray, x: np.ndarray) -> np.float32 | np.ndarray:
    """One chain of k, the last axis: 16 lanes, then the tree. Other axes are dots of their own."""
    assert w.dtype == x.dtype == np.float32
    lanes: list = [np.float32(0)] * 16
    for k in range(w.shape[-1]):
        lanes[k % 16] = lanes[k % 16] + w[..., k] * x[..., k]
    for step in (8, 4, 2, 1):
        lanes = [lanes[j] + lanes[j + step] for j in range(step)]
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


def block_chains(w: np.ndarray, x: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """FP8: acc = fma(chain of 128, block scale, acc) along k, the last axis, from +0; scales [...,
    K / 128]. Other axes are dots of their own.
    """
    parts = [slice(128 * block, 128 * block + 128) for block in range(scales.shape[-1])]
    chains = np.stack([chain(w[..., part], x[..., part]) for part in parts], -1)
    pairs = np.stack(np.broadcast_arrays(chains, scales), -1).reshape(-1, len(parts), 2)
    found = [_scaled_sum(pair.tolist()) for pair in pairs]
    return np.array(found, np.float32).reshape(chains.shape[:-1])


def _scaled_sum(pairs: list[list[float]]) -> float:
    accumulator = 0.0
    for chain_sum, scale in pairs:
        accumulator = nearest_f32(Fraction(chain_sum) * Fraction(scale) + Fraction(accumulator))
    return accumulator
