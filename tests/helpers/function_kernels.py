"""Kernels that apply one function of kernels/triton/functions.py to arrays. They are not decorated:
a test takes them interpreted or compiled.
"""

import triton.language as tl

from exactmoe.kernels.triton.functions import (
    canonical,
    exp32,
    exp64,
    fma32,
    log1p64,
    round_bf16,
    router_score,
    silu32,
    swiglu32,
    through_bf16,
)

UNARY = ("canonical", "exp32", "silu32", "sigmoid", "sqrt_softplus", "through_bf16", "round_bf16")


def unary(x, y, count, FUNCTION: tl.constexpr, BLOCK: tl.constexpr):
    """y float32 (bfloat16 for round_bf16) = FUNCTION(x float32)."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    value = tl.load(x + place, mask=mask, other=0.0)
    if FUNCTION == "exp32":
        value = exp32(value)
    elif FUNCTION == "silu32":
        value = silu32(value)
    elif FUNCTION == "sigmoid":
        value = router_score(value, True)
    elif FUNCTION == "sqrt_softplus":
        value = router_score(value, False)
    elif FUNCTION == "through_bf16":
        value = through_bf16(value)
    if FUNCTION == "round_bf16":
        tl.store(y + place, round_bf16(value).to(tl.bfloat16, bitcast=True), mask=mask)
    else:
        tl.store(y + place, canonical(value), mask=mask)


def wide(x, y, count, FUNCTION: tl.constexpr, BLOCK: tl.constexpr):
    """y float64 = exp64(-abs(x)), or log1p64 of x where x > 0, else of 0; x float64."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    value = tl.load(x + place, mask=mask, other=0.0)
    if FUNCTION == "exp64":
        value = exp64(-tl.abs(value))
    else:
        value = log1p64(tl.where(value < 0.0, 0.0, value))
    tl.store(y + place, value, mask=mask)


def swiglu(gate, up, y, limit, count, CLAMP: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    g = tl.load(gate + place, mask=mask, other=0.0)
    u = tl.load(up + place, mask=mask, other=0.0)
    tl.store(y + place, canonical(swiglu32(g, u, limit, CLAMP)), mask=mask)


def fused(a, b, c, y, count, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    factors = (tl.load(a + place, mask=mask), tl.load(b + place, mask=mask))
    addend = tl.load(c + place, mask=mask)
    tl.store(y + place, canonical(fma32(factors[0], factors[1], addend)), mask=mask)
