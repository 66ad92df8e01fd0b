"""The fixed functions in numba have the reference's bytes for float32 of every size and sign."""

import numba
import numpy as np
import pytest
import torch
from torch import Tensor

from exactmoe.formats.scales import decode_e4m3
from exactmoe.kernels.cpu import functions as kernels
from exactmoe.kernels.cpu.quantize import e4m3
from exactmoe.reference import functions as reference
from exactmoe.reference import quantize
from layers import assert_same_bits

SPECIAL = [float("nan"), -float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-45, -1e-45]


@pytest.fixture(scope="module")
def values() -> Tensor:
    """Special values, every exponent, and the range where exp and the scores do not saturate."""
    rng = torch.Generator().manual_seed(5)
    bits = torch.randint(-(2**31), 2**31, (20000,), generator=rng).int().view(torch.float32)
    near = torch.randn(20000, generator=rng) * 40
    edges = torch.tensor([-104.0, 89.0, 88.72, -87.34, 20.0, 32.0, 700.0, -700.0])
    return torch.cat([torch.tensor(SPECIAL), edges, edges.nextafter(torch.tensor(0.0)), bits, near])


def mapped(function, *columns: Tensor) -> Tensor:
    """function of each row of columns, through numba."""

    @numba.njit(error_model="numpy")
    def loop1(a, out):
        for i in range(a.shape[0]):
            out[i] = function(a[i])

    @numba.njit(error_model="numpy")
    def loop2(a, b, out):
        for i in range(a.shape[0]):
            out[i] = function(a[i], b[i], np.float32(2.5))

    out = torch.empty(len(columns[0]))
    (loop1 if len(columns) == 1 else loop2)(*(c.numpy() for c in columns), out.numpy())
    return out


@pytest.mark.parametrize("name", ["sigmoid_score", "sqrt_softplus_score", "canonical"])
def test_one_argument(name, values):
    found, expected = mapped(getattr(kernels, name), values), getattr(reference, name)(values)
    if name != "canonical":
        found, expected = reference.canonical(found), reference.canonical(expected)
    assert_same_bits(found, expected)


def test_exp32(values):
    found, expected = mapped(kernels.exp32, values), reference.exp32(values)
    assert_same_bits(reference.canonical(found), reference.canonical(expected))


def test_round_bf16(values):
    assert_same_bits(mapped(kernels.round_bf16, values), reference.to_bf16(values).float())


def test_swiglu32(values):
    up = values.flip(0).contiguous()
    found, expected = mapped(kernels.swiglu32, values, up), reference.swiglu32(values, up, 2.5)
    assert_same_bits(reference.canonical(found), reference.canonical(expected))


def test_e4m3_is_the_references_code(values):
    """Each value beside one of 448, so that the scale is 1 and nothing but the code decides."""
    small = values[torch.isfinite(values) & (values.abs() <= 448)]
    exact = torch.arange(-463, 464) / 2.0**9
    ties = torch.tensor([(2 * m + 1) * 2.0**e for m in range(8, 16) for e in range(-11, 4)])
    small = torch.cat([small, exact, ties, -ties])
    groups = torch.zeros(len(small), 128)
    groups[:, 0], groups[:, 1] = 448.0, small
    codes, scales = quantize(groups)
    assert bool((scales == 1).all())
    assert_same_bits(mapped(e4m3, small), decode_e4m3(codes)[:, 1].contiguous())
