"""Class `a8` on the CPU by properties: random banks over the whole range of exponents, reference
against CPU path byte for byte, both against integers where sums are exact, else float64.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from a8_cases import (
    bank_weight,
    codes_and_scales,
    exact_expected,
    float64_projection,
    random_x,
    scale_bytes,
    seeds,
    spans,
)
from exactmoe import ops
from exactmoe.config import Numerics
from exactmoe.errors import ConfigError
from exactmoe.formats import PackedWeight, e2m1, fp8_exact
from exactmoe.formats.rows import Rows
from exactmoe.runtime.routes import RouteTable
from layers import BACKENDS, assert_same_bits
from paths import Call, assert_same_parts

A8 = Numerics.preset("a8")
PROPERTY = settings(max_examples=40, deadline=None, derandomize=True)
FORMATS = ("mxfp4", "nvfp4")
NAN32 = 0x7FC00000


def project(backend: str, weight: PackedWeight, rows: Rows, experts: torch.Tensor) -> torch.Tensor:
    """One projection of token t by expert experts[t]: the down of `a8`, float32 [T, N]."""
    path = ops.path(backend)
    routes = RouteTable(
        torch.full((weight.num_experts + 1,), -7),
        torch.full((len(experts),), -7),
        torch.zeros(1, dtype=torch.int64),
    )
    path.route_table(experts[:, None].int(), weight.num_experts, routes)
    out = torch.full((len(experts), weight.rows), 3.0)
    path.down(rows, path.prepare(weight), routes, A8, out)
    return out


@st.composite
def calls(draw: st.DrawFn) -> Call:
    """A whole call of two or three experts; x of every size, clamps that bite."""
    format = draw(st.sampled_from(FORMATS))
    rng = torch.Generator().manual_seed(draw(seeds))
    hidden, inner = draw(st.sampled_from([(128, 128), (256, 128), (128, 256)]))
    sizes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    experts, tokens = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    weights = {
        name: bank_weight(rng, format, (experts, *size), draw(scale_bytes(format)))
        for name, size in sizes.items()
    }
    return Call(
        **weights,
        x=random_x(rng, tokens, hidden),
        expert_ids=torch.randint(-1, experts + 1, (tokens, 2), generator=rng).int(),
        weights=torch.randn(tokens, 2, generator=rng),
        numerics=A8,
        swiglu_limit=draw(st.sampled_from([None, 0.75, 10.0])),
        shared=draw(st.sampled_from([None, torch.randn(tokens, hidden, generator=rng)])),
    )


@PROPERTY
@given(call=calls())
def test_random_banks_give_the_bytes_of_the_reference(call):
    """Every stage: codes and scales of x and h, h, slots, y; every NaN is the one NaN."""
    expected = call.run(ops.path("reference"))
    assert_same_parts(call.run(ops.path("cpu")), expected)
    for name in ("h", "slots", "y"):
        part = expected[name]
        bits = part.view(torch.int32 if part.dtype == torch.float32 else torch.int16)
        quiet = NAN32 if part.dtype == torch.float32 else 0x7FC0
        assert bool((bits[part.isnan()] == quiet).all()), name


@PROPERTY
@given(call=calls(), data=st.data())
def test_a_token_that_is_not_finite_keeps_it_to_itself(call, data):
    """NaN or Inf in one group of one token: its outputs are the one NaN, no other token changes."""
    tokens, columns = call.x.shape
    bad = data.draw(st.integers(0, tokens - 1))
    place = data.draw(st.integers(0, columns - 1))
    value = data.draw(st.sampled_from([float("nan"), float("inf"), -float("inf")]))
    clean = call.run(ops.path("cpu"))
    call.x[bad, place] = value
    dirty, expected = (call.run(ops.path(name)) for name in ("cpu", "reference"))
    assert_same_parts(dirty, expected)
    others = [t for t in range(tokens) if t != bad]
    assert_same_bits(dirty["y"][others], clean["y"][others])
    group = slice(place // 128 * 128, place // 128 * 128 + 128)
    assert bool(dirty["x"][bad, group].isnan().all())
    assert float(dirty["x scales"][bad, place // 128]) == 1.0
    present = (call.expert_ids[bad] >= 0) & (call.expert_ids[bad] < call.gate.num_experts)
    slots = dirty["slots"].view(tokens, 2, -1)[bad][present]
    assert bool((slots.view(torch.int32) == NAN32).all())
    if bool(present.any()):
        assert bool((dirty["y"][bad].view(torch.int16) == 0x7FC0).all())


@PROPERTY
@given(case=spans())
def test_exact_sums_are_integers(case):
    """Spans of 14 and 15 binades, bytes 0, 1 and 254: a sum is rounded once, as it leaves."""
    weight, rows, experts, span = case
    assert fp8_exact(weight).tolist() == [span <= 14] * 2
    expected = exact_expected(weight, rows, experts)
    for backend in BACKENDS:
        assert_same_bits(project(backend, weight, rows, experts), expected)


@PROPERTY
@given(seed=seeds, format=st.sampled_from(FORMATS), data=st.data())
def test_error_against_float64(seed, format, data):
    """Any data, contract section 8: error / sum of magnitudes, of the chain of 128 and the fmas."""
    rng, columns = torch.Generator().manual_seed(seed), 512
    scales = data.draw(scale_bytes(format).filter(lambda s: format == "nvfp4" or 40 < s[0] < 120))
    weight = bank_weight(rng, format, (2, 16, columns), scales)
    rows = codes_and_scales(rng, 4, columns, -22, 4)
    experts = torch.tensor([0, 1, 1, 0])
    truth, magnitude = float64_projection(weight, rows, experts)
    assert bool((magnitude < 2.0**127).all())
    found = project("cpu", weight, rows, experts)
    assert_same_bits(project("reference", weight, rows, experts), found)
    error = (found.double() - truth).abs()
    # Below the smallest normal number an error is measured in its steps.
    assert bool((error <= magnitude * 2.0**-21 * (columns / 16 + 4) + 2.0**-149).all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_chains_end_every_128(backend):
    """2^24 in the first group, ones in the next: a chain that went on would lose them."""
    codes = torch.zeros(1, 16, 256, dtype=torch.uint8)
    codes[..., 0], codes[..., 128], codes[..., 129] = 2, 2, 2
    weight = PackedWeight("mxfp4", e2m1.pack(codes), torch.full((1, 16, 8), 127).to(torch.uint8))
    values = torch.zeros(1, 256)
    values[0, [0, 128, 129]] = torch.tensor([256.0, 1.0, 1.0])
    rows = Rows(values, torch.tensor([[2.0**16, 1.0]]))
    found = project(backend, weight, rows, torch.tensor([0]))
    assert found.tolist() == [[2.0**24 + 2] * 16]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("low", [0, 1, 158])
def test_every_exponent_of_an_expert_side_by_side(low, backend):
    """97 bytes in one row, to 254: each block gives its own power; blocks of zeros are no part."""
    codes, columns = torch.zeros(1, 16, 4096, dtype=torch.uint8), 32 * torch.arange(97)
    codes[..., columns] = 2  # 1.0
    scales = torch.full((1, 16, 128), 254, dtype=torch.uint8)
    scales[..., :97] = low + torch.arange(97)
    weight = PackedWeight("mxfp4", e2m1.pack(codes), scales)
    values = torch.zeros(97, 4096)
    values[torch.arange(97), columns] = 1.0
    rows = Rows(values, torch.ones(97, 32))
    found = project(backend, weight, rows, torch.zeros(97, dtype=torch.int64))
    expected = torch.exp2(low + torch.arange(97).double() - 127).float()
    assert_same_bits(found, expected[:, None].expand(97, 16).contiguous())


@pytest.mark.parametrize("place", [(0, 0, 0), (1, 15, 3)])
def test_the_byte_of_nan_is_refused(place):
    scales = torch.full((2, 16, 4), 254, dtype=torch.uint8)
    scales[place] = 255
    expert, row, block = place
    with pytest.raises(ConfigError, match=f"0xFF.*expert {expert}, row {row}, block {block}"):
        PackedWeight("mxfp4", torch.zeros(2, 16, 64, dtype=torch.uint8), scales)
