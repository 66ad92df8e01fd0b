"""The tile of FP8 blocks: every code, block scales, segments, odd sizes; reference bytes."""

import pytest
import torch
from torch import Tensor

from exactmoe.config import Numerics
from exactmoe.formats import PackedWeight, operand
from exactmoe.formats.rows import Rows
from exactmoe.kernels.cpu import dot as kernels
from exactmoe.kernels.cpu.project import SCALE_ROW_BYTES, SCALE_ROWS, SCALES
from exactmoe.ops.cpu.down import down
from exactmoe.ops.cpu.prepare import prepare
from exactmoe.reference import dot_blocks
from exactmoe.reference import project as reference_project
from exactmoe.reference.functions import canonical
from exactmoe.runtime.routes import RouteTable
from layers import assert_same_bits
from paths import random_weight
from tiles import run

LEGAL = torch.tensor([b for b in range(256) if b & 0x7F != 0x7F] + [0, 0x80]).byte()


def expected(weight: PackedWeight, x: Tensor, segment: int) -> Tensor:
    assert weight.scales is not None
    return dot_blocks(operand(weight, 0), x, weight.scales[0], segment)


@pytest.mark.parametrize("tokens", kernels.TOKENS)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("columns", [16, 32, 48, 128, 144, 256, 304, 1040])
def test_one_segment(tokens, columns, fused, rng):
    weight = random_weight(rng, "fp8", 1, 4, columns)
    x = torch.randn(tokens, columns, generator=rng).bfloat16().float()
    assert_same_bits(run(prepare(weight), x, columns, fused=fused), expected(weight, x, columns))


@pytest.mark.parametrize("segment", [128, 512, 4096])
@pytest.mark.parametrize("columns", [4352, 4112])
def test_segments(segment, columns, rng):
    weight = random_weight(rng, "fp8", 1, 4, columns)
    x = torch.randn(4, columns, generator=rng).bfloat16().float()
    found = run(prepare(weight), x, segment)
    assert_same_bits(found, expected(weight, x, segment))
    assert bool((found != run(prepare(weight), x, columns)).any()), "segments decide bits here"


@pytest.mark.parametrize("tokens", kernels.TOKENS)
def test_each_row_has_its_own_scales(tokens, rng):
    weight = random_weight(rng, "fp8", 1, 4, 272)
    x = torch.randn(tokens, 272, generator=rng).bfloat16().float()
    scales, prepared = torch.rand(4, 3, generator=rng), prepare(weight)
    prepared.experts[0, SCALES] = scales.data_ptr()
    prepared.layout[SCALE_ROW_BYTES], prepared.layout[SCALE_ROWS] = 12, 1
    w = operand(weight, 0)
    rows = [dot_blocks(w[r : r + 1], x, scales[r : r + 1], 272) for r in range(4)]
    assert_same_bits(run(prepared, x, 272), torch.cat(rows, 1))


@pytest.mark.parametrize("tokens", kernels.TOKENS)
def test_every_code(tokens):
    """x picks one element at a time: what comes out is the code's value, for -0 a zero."""
    codes = torch.stack([LEGAL, LEGAL.flip(0), LEGAL.roll(77), LEGAL.roll(131)])
    weight = PackedWeight("fp8", codes[None].contiguous(), torch.ones(1, 1, 2))
    prepared, values = prepare(weight), codes.view(torch.float8_e4m3fn).float()
    for column in range(256):
        x = torch.zeros(tokens, 256)
        x[:, column] = 1.0
        assert torch.equal(run(prepared, x, 256), values[:, column].expand(tokens, 4))


def project(weight: PackedWeight, x: Tensor) -> Tensor:
    """x float32 [T, K] through one expert: float32 [T, N]."""
    out = torch.full((len(x), weight.rows), 7.0)
    slots = torch.arange(len(x))
    routes = RouteTable(torch.tensor([0, len(x)]), slots, torch.zeros(1, dtype=torch.int64))
    down(Rows(x, None), prepare(weight), routes, Numerics(slot="f32"), out)
    return out


@pytest.mark.parametrize("rows", [1, 3, 128, 130, 255, 260])
@pytest.mark.parametrize("tokens", [1, 2, 3, 7])
def test_rows_that_do_not_fill_a_block(rows, tokens, rng):
    weight = random_weight(rng, "fp8", 1, rows, 144)
    x = torch.randn(tokens, 144, generator=rng).bfloat16().float()
    assert_same_bits(project(weight, x), expected(weight, x, 144))


def test_routed_experts_have_no_segments(rng):
    weight = random_weight(rng, "fp8", 1, 20, 4352)
    x = torch.randn(3, 4352, generator=rng).bfloat16().float()
    found = project(weight, x)
    assert_same_bits(found, reference_project(weight, 0, Rows(x, None)))
    assert_same_bits(found, expected(weight, x, 4352))
    assert bool((found != expected(weight, x, 4096)).any())


@pytest.mark.parametrize("scale", [2.0**-149, 2.0**-127, 2.0**-60, 3e38])
@pytest.mark.parametrize("size", [2.0**-70, 1.0, 2.0**60])
def test_scales_of_any_size_and_subnormal_sums(scale, size, rng):
    weight = random_weight(rng, "fp8", 1, 130, 272)
    assert weight.scales is not None
    weight.scales[0, 1] = scale
    x = (torch.randn(3, 272, generator=rng) * size).bfloat16().float()
    assert_same_bits(project(weight, x), canonical(expected(weight, x, 272)))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38, 1e-40])
def test_special_values_stay_with_their_token(value, rng):
    weight = random_weight(rng, "fp8", 1, 20, 272)
    weight.codes[0, 3, 100], weight.codes[0, 4, 100] = 0, 0x80
    x = torch.randn(5, 272, generator=rng).bfloat16().float()
    clean = project(weight, x)
    x[1, 100] = torch.tensor(value).bfloat16().float()
    found = project(weight, x)
    assert_same_bits(found, canonical(expected(weight, x, 272)))
    assert_same_bits(found[[0, 2, 3, 4]], clean[[0, 2, 3, 4]])
