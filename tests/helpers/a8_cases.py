"""Random `a8` projections over the whole range of exponents, and their truth."""

from dataclasses import replace
from fractions import Fraction

import torch
from hypothesis import strategies as st
from torch import Tensor

from chains import nearest_f32
from exactmoe.formats import PackedWeight, e2m1
from exactmoe.formats.rows import Rows
from exactmoe.formats.scales import decode_e4m3
from layers import true_values

BLOCK = {"nvfp4": 16, "mxfp4": 32}
E8M0_EDGES = (0, 1, 2, 126, 127, 128, 253, 254)
# E4M3 bytes of the powers of two 2^-9 ... 2^8.
E4M3_POWERS = torch.tensor([1, 2, 4, *range(8, 0x7F, 8)], dtype=torch.uint8)

seeds = st.integers(0, 2**31)


@st.composite
def scale_bytes(draw: st.DrawFn, format: str) -> tuple[int, int]:
    """Least and most scale byte of an expert: E8M0 anywhere, at most 96 apart; E4M3 anywhere."""
    if format == "mxfp4":
        low = draw(st.one_of(st.sampled_from(E8M0_EDGES), st.integers(0, 254)))
        return low, min(254, low + draw(st.sampled_from((0, 1, 13, 14, 15, 60, 96))))
    low = draw(st.integers(0, 0x7E))
    return low, min(0x7E, low + draw(st.sampled_from((0, 7, 16, 0x7E))))


def random_codes(rng: torch.Generator, experts: int, rows: int, columns: int) -> Tensor:
    """Code bytes, some blocks of 32 all zeros (+0 and -0)."""
    codes = torch.randint(0, 256, (experts, rows, columns // 2), generator=rng).to(torch.uint8)
    empty = torch.rand(experts, rows, columns // 32, generator=rng) < 0.1
    zeros = torch.where(codes < 128, 0x80, 0x08).to(torch.uint8)
    return torch.where(empty.repeat_interleave(16, -1), zeros, codes)


def bank_weight(
    rng: torch.Generator, format: str, sizes: tuple[int, int, int], scales: tuple[int, int]
) -> PackedWeight:
    """A weight [E, N, K] whose scale bytes are drawn between two; NVFP4's global scales too."""
    experts, rows, columns = sizes
    codes = random_codes(rng, *sizes)
    shape = (experts, rows, columns // BLOCK[format])
    low, high = scales
    drawn = torch.randint(low, high + 1, shape, generator=rng).to(torch.uint8)
    if format == "mxfp4":
        return PackedWeight("mxfp4", codes, drawn)
    factors = torch.exp2(torch.randint(-30, 10, (experts,), generator=rng).float())
    factors = factors * (1 + torch.rand(experts, generator=rng))
    return PackedWeight("nvfp4", codes, drawn, factors)


def random_x(rng: torch.Generator, tokens: int, columns: int) -> Tensor:
    """Float32 rows of values of bf16: every group of 128 in a binade of its own, from subnormals to
    2^126, some groups zero, half of the elements far smaller than the rest.
    """
    groups = columns // 128
    size = torch.randint(-140, 126, (tokens, groups, 1), generator=rng).double()
    spread = torch.randint(-16, 1, (tokens, groups, 128), generator=rng).double()
    values = torch.randn(tokens, groups, 128, generator=rng).double().clamp(-3, 3)
    values = values * torch.exp2(size + spread) / 4
    values[torch.rand(tokens, groups, generator=rng) < 0.1] = 0.0
    return values.float().bfloat16().float().flatten(1)


def codes_and_scales(rng: torch.Generator, tokens: int, columns: int, low: int, high: int) -> Rows:
    """Rows with any finite e4m3 code and token scales 2^low ... 2^high."""
    codes = torch.randint(0, 0x7F, (tokens, columns), generator=rng)
    codes += 128 * torch.randint(0, 2, codes.shape, generator=rng)
    exponents = torch.randint(low, high + 1, (tokens, columns // 128), generator=rng)
    return Rows(decode_e4m3(codes.to(torch.uint8)) + 0.0, torch.exp2(exponents.float()))


def float64_projection(weight: PackedWeight, rows: Rows, experts: Tensor) -> tuple[Tensor, Tensor]:
    """(truth, sum of magnitudes) float64 [T, N] of token t by expert experts[t], on the operands
    that were given.
    """
    assert rows.scales is not None
    x = rows.values.double() * rows.scales.double().repeat_interleave(128, -1)
    w = true_values(weight)[experts]
    return torch.einsum("tnk,tk->tn", w, x), torch.einsum("tnk,tk->tn", w.abs(), x.abs())


def exact_projection(weight: PackedWeight, rows: Rows, experts: Tensor) -> Tensor:
    """Float32 [T, N], where every sum is exact in float32: integers, then the one rounding of the
    global scale (or of 2^p, which may be subnormal or overflow).
    """
    assert rows.scales is not None
    w, result = true_values(weight), torch.empty(len(experts), weight.rows)
    for token, expert in enumerate(experts.tolist()):
        product = rows.values[token].double() * rows.scales[token].repeat_interleave(128)
        x = [Fraction(value) for value in product.tolist()]
        used = [k for k, value in enumerate(x) if value]
        for row in range(weight.rows):
            line = w[expert, row].tolist()
            total = sum((Fraction(line[k]) * x[k] for k in used), Fraction(0))
            result[token, row] = nearest_f32(total)
    return result


@st.composite
def spans(draw: st.DrawFn) -> tuple[PackedWeight, Rows, torch.Tensor, int]:
    """A weight whose 128-wide pieces span `span` binades from any byte on, and x in {-1, 0, 1} with
    few values in the high blocks: every sum is exact in float32.
    """
    format = draw(st.sampled_from(tuple(BLOCK)))
    span = draw(
        st.sampled_from([0, 1, 13, 14, 15, 17] if format == "nvfp4" else [0, 13, 14, 15, 16])
    )
    rng = torch.Generator().manual_seed(draw(seeds))
    block = BLOCK[format]
    codes = torch.randint(0, 16, (2, 16, 256), generator=rng).to(torch.uint8)
    codes[..., ::block] = 2  # every block counts
    high = torch.rand(2, 16, 256 // block, generator=rng) < 0.3
    high[..., 0], high[..., 1] = True, False
    if format == "mxfp4":
        edges = [byte for byte in E8M0_EDGES if byte <= 254 - span]
        low = draw(st.one_of(st.sampled_from(edges), st.integers(0, 254 - span)))
        scales = torch.where(high, low + span, low).to(torch.uint8)
        weight = PackedWeight("mxfp4", e2m1.pack(codes), scales)
    else:
        low = draw(st.integers(0, 17 - span))
        scales = torch.where(high, E4M3_POWERS[low + span], E4M3_POWERS[low])
        factors = torch.rand(2, generator=rng) + 0.5
        weight = PackedWeight("nvfp4", e2m1.pack(codes), scales, factors)
    values = torch.zeros(3, 256)
    for token in range(3):
        picked = torch.randperm(256, generator=rng)[:4]
        values[token, picked] = 2.0 * torch.randint(0, 2, (4,), generator=rng) - 1
    token_scales = torch.exp2(torch.randint(0, 2, (3, 2), generator=rng).float())
    return weight, Rows(values, token_scales), torch.tensor([0, 1, 0]), span


def exact_expected(weight: PackedWeight, rows: Rows, experts: Tensor) -> Tensor:
    """`exact_projection`, with an NVFP4 global scale as the one rounding after it."""
    if weight.global_scale is None:
        return exact_projection(weight, rows, experts) + 0.0
    ones = replace(weight, global_scale=torch.ones_like(weight.global_scale))
    return exact_projection(ones, rows, experts) * weight.global_scale[experts][:, None] + 0.0
