"""Class `a8` on the card's path by properties, as tests/ops/test_a8_properties.py has them: by
bytes where sums are exact, else by error.
"""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from a8_cases import (
    BLOCK,
    bank_weight,
    codes_and_scales,
    exact_expected,
    float64_projection,
    random_x,
    scale_bytes,
    seeds,
    spans,
)
from exactmoe.config import Numerics
from exactmoe.formats.rows import Rows
from exactmoe.ops.triton.quantize import quantize
from exactmoe.reference import quantize as reference_quantize
from layers import assert_same_bits
from triton_device import DEVICE
from triton_experts import Experts

A8 = Numerics.preset("a8")
FEW = settings(max_examples=12, deadline=None, derandomize=True)


def project(weight, rows, experts):
    """One projection of token t by expert experts[t], float32 [T, N]."""
    return Experts((weight,), rows, experts[:, None].int()).down(rounded=False)


@FEW
@given(case=spans())
def test_exact_sums_are_integers(case):
    weight, rows, experts, _ = case
    found = project(weight, rows, experts)
    assert_same_bits(found + 0.0, exact_expected(weight, rows, experts))


@FEW
@given(seed=seeds, format=st.sampled_from(tuple(BLOCK)), data=st.data())
def test_error_against_float64(seed, format, data):
    rng, columns = torch.Generator().manual_seed(seed), 384
    scales = data.draw(scale_bytes(format).filter(lambda s: format == "nvfp4" or 40 < s[0] < 120))
    weight = bank_weight(rng, format, (2, 16, columns), scales)
    rows = codes_and_scales(rng, 3, columns, -22, 4)
    experts = torch.tensor([0, 1, 1])
    truth, magnitude = float64_projection(weight, rows, experts)
    error = (project(weight, rows, experts).double() - truth).abs()
    assert bool((error <= magnitude * 2.0**-21 * (columns / 16 + 4) + 2.0**-149).all())


@FEW
@given(seed=seeds, format=st.sampled_from(tuple(BLOCK)), data=st.data())
def test_a_group_that_is_not_finite_stays_in_its_token(seed, format, data):
    """Every output of the token is the one NaN; gate and up in one launch and in two."""
    rng = torch.Generator().manual_seed(seed)
    sizes = (2, 16, 256)
    pair = tuple(bank_weight(rng, format, sizes, data.draw(scale_bytes(format))) for _ in range(2))
    x = random_x(rng, 3, 256)
    clean = codes(x)
    bad, group = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 1))
    x[bad, 128 * group + 5] = data.draw(st.sampled_from([float("nan"), -float("inf")]))
    dirty = codes(x)
    assert bool(dirty.values[bad, 128 * group : 128 * group + 128].isnan().all())
    ids, weights = torch.tensor([[0], [1], [1]]).int(), torch.full((3, 1), 0.7)
    before, after, apart = (
        Experts(pair, rows, ids, weights, 10.0).gate_up(launches=launches)
        for rows, launches in ((clean, 1), (dirty, 1), (dirty, 2))
    )
    assert_same_bits(apart, after)
    others = [token for token in range(3) if token != bad]
    assert_same_bits(after[others], before[others])
    assert bool((after[bad].view(torch.int32) == 0x7FC00000).all())


def codes(x):
    """x as the path quantises it, which is as the reference does; values decoded."""
    out = Rows(
        torch.zeros(x.shape, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn),
        torch.zeros(x.shape[0], x.shape[1] // 128, device=DEVICE),
    )
    quantize(x.to(DEVICE), out)
    expected_codes, expected_scales = reference_quantize(x)
    assert_same_bits(out.values.view(torch.uint8).cpu(), expected_codes)
    assert_same_bits(out.scales.cpu(), expected_scales)
    return Rows(out.values.cpu().float(), out.scales.cpu())
