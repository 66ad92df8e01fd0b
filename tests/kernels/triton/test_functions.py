"""The fixed functions of the Triton kernels have the reference's bytes.

With a card (`make gpu-test`) they run compiled, on millions of values; only then do these tests say
something about the hardware's fma, division, square root, minimum, maximum and subnormals: the
interpreter computes with numpy, and its fma is made of float64 steps by functions.py.
"""

import pytest
import torch
from torch import Tensor

import function_kernels as kernels
from exactmoe.reference import functions as reference
from layers import assert_same_bits
from triton_device import DEVICE, INTERPRETED, jit

COUNT = 1 << (15 if INTERPRETED else 22)
BLOCK = 1 << (15 if INTERPRETED else 10)
# Rounding of the two scores is in f64; every other function is in f32.
EXPECTED = {
    "canonical": reference.canonical,
    "exp32": reference.exp32,
    "silu32": reference.silu32,
    "sigmoid": reference.sigmoid_score,
    "sqrt_softplus": reference.sqrt_softplus_score,
    "through_bf16": lambda x: reference.to_bf16(x).float(),
    "round_bf16": reference.to_bf16,
}
EDGES = torch.tensor(
    [0.0, 1e-45, 1e-40, 2.0**-126, 1e-30, 2.0**-24, 0.5, 1.0, 20.0, 32.0, 88.0, 88.72, 88.73, 89.0]
    + [89.01, 103.9, 104.0, 104.1, 150.0, 700.0, 745.2, 1e4, 3.4e38, float("inf"), float("nan")]
)


def launch(kernel, *arguments, y: Tensor, **constants) -> Tensor:
    """y of kernel(*tensors, y, *numbers, count)."""
    tensors = [a.to(DEVICE) for a in arguments if isinstance(a, Tensor)]
    numbers = [a for a in arguments if not isinstance(a, Tensor)]
    y = y.to(DEVICE)
    jit(kernel)[(-(-y.numel() // BLOCK),)](
        *tensors, y, *numbers, y.numel(), BLOCK=BLOCK, enable_fp_fusion=False, **constants
    )
    return y.cpu()


def every_class(rng: torch.Generator) -> Tensor:
    """Random bits (all classes of float32), the sizes that functions turn at, and edges."""
    bits = torch.randint(0, 2**32, (COUNT,), generator=rng, dtype=torch.int64).int()
    sizes = torch.randn(COUNT, generator=rng) * 40
    small = torch.randint(0, 2**24, (COUNT // 8,), generator=rng).int()  # subnormals too
    return torch.cat([bits.view(torch.float32), sizes, small.view(torch.float32), EDGES, -EDGES])


@pytest.mark.parametrize("name", kernels.UNARY)
def test_one_argument(name, rng):
    x = every_class(rng)
    kind = torch.bfloat16 if name == "round_bf16" else torch.float32
    found = launch(kernels.unary, x, y=torch.empty(len(x), dtype=kind), FUNCTION=name)
    expected = EXPECTED[name](x)
    assert_same_bits(found, expected if kind != torch.float32 else reference.canonical(expected))


@pytest.mark.parametrize("limit", [None, 0.75, 10.0])
def test_swiglu(limit, rng):
    gate, up = every_class(rng), every_class(rng)
    up[:COUNT] = torch.randn(COUNT, generator=rng) * 8
    number = 0.0 if limit is None else limit
    y = torch.empty_like(gate)
    found = launch(kernels.swiglu, gate, up, number, y=y, CLAMP=limit is not None)
    assert_same_bits(found, reference.canonical(reference.swiglu32(gate, up, limit)))


def test_the_f64_functions(rng):
    """Compared before their rounding to float32, which hides most of their bits."""
    x = torch.rand(COUNT // 4, generator=rng, dtype=torch.float64)
    x = torch.cat([x, x * 2.0**-30, torch.tensor([0.0, 1.0, 0.5, 1e-300], dtype=torch.float64)])
    x = torch.cat([x, -x * 700, torch.tensor([float("nan"), -0.0, -700.0], dtype=torch.float64)])
    for name, expected in (("exp64", reference.exp64(-x.abs())), ("log1p64", log1p64(x))):
        found = launch(kernels.wide, x, y=torch.empty_like(x), FUNCTION=name)
        assert_same_bits(found.nan_to_num(7.0), expected.nan_to_num(7.0))
        assert found.isnan().tolist() == expected.isnan().tolist()


def log1p64(x: Tensor) -> Tensor:
    return reference.log1p64(x.clamp(min=0))


def test_fma_does_not_round_through_float64():
    """A product half way between two float32, and an addend that float64 would lose."""
    half_way = torch.full((2,), 1 + 2.0**-12)
    tiny = torch.tensor([2.0**-80, -(2.0**-80)])
    found = launch(kernels.fused, half_way, half_way, tiny, y=torch.empty(2))
    assert found.tolist() == [1 + 2.0**-11 + 2.0**-23, 1 + 2.0**-11]


def test_fma_is_rounded_once(rng):
    """Addends that cancel the product but for its last bits, and every class."""
    a, b = every_class(rng), every_class(rng)
    c = every_class(rng)
    half = COUNT // 2
    a[:half], b[:half] = torch.randn(2, half, generator=rng)
    c[:half] = -(a[:half] * b[:half])
    found = launch(kernels.fused, a, b, c, y=torch.empty_like(a))
    expected = reference.canonical(reference.fma32(a, b, c))
    assert_same_bits(found, expected)
    assert (expected != reference.canonical(a * b + c)).sum() > half // 4
