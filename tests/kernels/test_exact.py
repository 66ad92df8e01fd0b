"""exact_rows: where a multiply and an add may be one fma, and that the range is needed."""

import numba
import numpy as np
import pytest
import torch
from torch import Tensor

from exactmoe.config import Numerics
from exactmoe.formats import PackedWeight, apply_global_scale, operand
from exactmoe.formats.rows import Rows
from exactmoe.kernels.cpu.dot import TOKENS, tile_address
from exactmoe.kernels.cpu.exact import exact_rows
from exactmoe.kernels.cpu.project import TILES
from exactmoe.ops.cpu.down import down
from exactmoe.ops.cpu.prepare import CpuWeight, prepare
from exactmoe.reference import dot
from exactmoe.reference.functions import canonical
from exactmoe.runtime.routes import RouteTable
from layers import assert_same_bits, exact_weight
from paths import random_weight


@pytest.mark.parametrize(
    ("value", "inside"),
    [
        (0.0, True),
        (-0.0, True),
        (2.0**-40, True),
        (-(2.0**-40), True),
        (2.0**-40 * (1 - 2.0**-8), False),
        (2.0**64, True),
        (2.0**64 * (1 + 2.0**-7), False),
        (1e-45, False),
        (float("inf"), False),
        (-float("inf"), False),
        (float("nan"), False),
    ],
)
def test_range(value, inside):
    values = np.ones((3, 20), np.float32)
    values[1, 19] = value
    exact = np.zeros(3, np.bool_)
    numba.njit(lambda v, e: exact_rows(v, e))(values, exact)
    assert exact.tolist() == [True, inside, True]


def one_token(x: Tensor, prepared: CpuWeight) -> Tensor:
    """x float32 [1, K] through `down` of one expert: float32 [1, N]."""
    out = torch.empty(1, prepared.weight.rows)
    one = torch.zeros(1, dtype=torch.int64)
    routes = RouteTable(torch.tensor([0, 1]), one, one.clone())
    down(Rows(x, None), prepared, routes, Numerics(slot="f32"), out)
    return out


def underflow(rng: torch.Generator) -> tuple[PackedWeight, Tensor]:
    """One block of a large exponent that meets zeros; elsewhere the products are subnormal."""
    weight = random_weight(rng, "mxfp4", 1, 64, 1024)
    assert weight.scales is not None
    weight.scales[..., 0], weight.scales[..., 1:] = 119, 30
    x = (torch.randn(1, 1024, generator=rng) * 2.0**-58).bfloat16().float()
    x[:, :32] = 0.0
    return weight, x


def overflow(rng: torch.Generator) -> tuple[PackedWeight, Tensor]:
    """-4 x 2^125 and then 4 x 2^126 in one lane: the second overflows, the sum would not."""
    values = torch.zeros(1, 4, 32)
    values[0, :, 0], values[0, :, 16] = -4.0, 4.0
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16] = 2.0**125, 2.0**126
    return exact_weight("nvfp4", values), x


def small_bf16(rng: torch.Generator) -> tuple[PackedWeight, Tensor]:
    """A bf16 weight of 2^-100 and smaller, x of 2^-40 and larger."""
    values = torch.randn(1, 64, 1024, generator=rng) * 2.0**-100
    return PackedWeight("bf16", values.bfloat16()), torch.full((1, 1024), 3 * 2.0**-40)


CASES = [underflow, overflow, small_bf16]


@pytest.mark.parametrize("case", CASES)
def test_outside_of_the_range_the_bytes_are_the_references(case, rng):
    weight, x = case(rng)
    accumulators = dot(operand(weight, 0), x)
    expected = canonical(apply_global_scale(weight, 0, accumulators))
    assert_same_bits(one_token(x, prepare(weight)), expected)


@pytest.mark.parametrize("case", CASES)
def test_outside_of_the_range_fused_products_would_differ(case, rng):
    """The fault that the test above looks for: rows that are taken as exact and are not."""
    weight, x = case(rng)
    prepared = prepare(weight)
    expected = one_token(x, prepared)
    fused = [tile_address(weight.format, tokens, True) for tokens in TOKENS]
    prepared.layout[TILES:] = fused * 2
    with pytest.raises(AssertionError, match="differ"):
        assert_same_bits(one_token(x, prepared), expected)
