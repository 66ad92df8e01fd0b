"""The CPU ops of the routed experts give the reference's bytes, stage by stage."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from exactmoe import ops
from exactmoe.config import Numerics
from exactmoe.formats import PackedWeight
from exactmoe.ops.cpu import threads
from layers import assert_same_bits
from paths import FORMATS, Call, assert_same_parts, one_expert, random_weight

CPU, REFERENCE = ops.path("cpu"), ops.path("reference")
NAN, INF = float("nan"), float("inf")
CASES = [
    (format, activation, sizes, width)
    for format in FORMATS
    for activation, sizes, width in (
        ("a16", (96, 160), 17),
        ("a16", (32, 32), 3),
        ("a8", (256, 128), 17),
        ("a8", (128, 256), 2),
    )
    if (format, activation) != ("fp8", "a8")  # the layer refuses it
]


def compare(call: Call) -> None:
    assert_same_parts(call.run(CPU), call.run(REFERENCE))


@pytest.mark.parametrize(("format", "activation", "sizes", "width"), CASES)
def test_every_stage_has_the_reference_bytes(format, activation, sizes, width, rng):
    compare(Call.random(rng, format, activation, sizes, width))


@pytest.mark.parametrize("activation", ["a16", "a8"])
@pytest.mark.parametrize("width", [0, 1, 2, 3, 64])
def test_widths(activation, width, rng):
    compare(Call.random(rng, "nvfp4", activation, (128, 128), width))


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 7, 8, 9, 63, 64, 65, 130])
def test_tokens_of_one_expert(tokens, rng):
    call = Call.random(rng, "nvfp4", "a16", (32, 32), tokens)
    ids, weights = torch.full((tokens, 1), 5).int(), call.weights[:, :1].contiguous()
    compare(replace(call, expert_ids=ids, weights=weights))


def test_a_planted_fault_is_seen(rng):
    call = Call.random(rng, "nvfp4", "a16", (96, 160), 3)
    expected = call.run(REFERENCE)
    # The last mantissa bit of one value of x, for a token that some expert serves.
    token = int((call.expert_ids >= 0).any(1).nonzero()[0])
    call.x.view(torch.int32)[token, 95] ^= 1 << 16
    with pytest.raises(AssertionError, match="differ"):
        assert_same_parts(call.run(CPU), expected)


@pytest.mark.parametrize("numerics", [Numerics(slot="f32"), Numerics(output="f32")])
@pytest.mark.parametrize("shared", [True, False])
def test_slot_and_output_types(numerics, shared, rng):
    call = Call.random(rng, "mxfp4", "a16", (64, 32), 5)
    compare(replace(call, numerics=numerics, shared=call.shared if shared else None))


@pytest.mark.parametrize("activation", ["a16", "a8"])
@pytest.mark.parametrize("value", [NAN, -NAN, INF, -INF, 3e38, 1e-40, -0.0])
def test_special_values_stay_with_their_token(activation, value, rng):
    call = Call.random(rng, "nvfp4", activation, (128, 128), 9)
    call = replace(call, swiglu_limit=None)
    clean = call.run(CPU)
    x = call.x.clone()
    x[4, 7] = torch.tensor(value).bfloat16().float()
    dirty = replace(call, x=x)
    compare(dirty)
    others = [t for t in range(9) if t != 4]
    assert_same_bits(dirty.run(CPU)["y"][others], clean["y"][others])


def test_special_weights_and_shared_rows(rng):
    call = Call.random(rng, "nvfp4", "a16", (32, 64), 12)
    for token, value in enumerate((NAN, INF, -INF, 0.0, -0.0, 3e38, 1e-45)):
        call.weights[token, token % 4] = value
    assert call.shared is not None
    call.shared[10, 3], call.shared[11, 5] = NAN, INF
    compare(call)


def test_equal_ids_are_ordered_by_the_weights_bits(rng):
    call = Call.random(rng, "nvfp4", "a16", (32, 32), 6)
    call.expert_ids[:, 1:] = 2
    call.weights[0] = torch.tensor([1.0, -1.0, 1e8, 1.0])
    compare(call)
    order = torch.tensor([3, 1, 0, 2])
    shuffled = replace(
        call, expert_ids=call.expert_ids[:, order].contiguous(), weights=call.weights[:, order]
    )
    shuffled.weights = shuffled.weights.contiguous()
    assert_same_bits(shuffled.run(CPU)["y"], call.run(CPU)["y"])


def strided(weight: PackedWeight, other: PackedWeight) -> PackedWeight:
    """The same weight as the first half of a fused [E, 2N, ..] tensor."""

    def fuse(a: Tensor | None, b: Tensor | None) -> Tensor | None:
        return None if a is None or b is None else torch.cat([a, b], 1)[:, : a.shape[1]]

    fused = replace(
        weight, codes=fuse(weight.codes, other.codes), scales=fuse(weight.scales, other.scales)
    )
    assert fused.codes.stride(0) == 2 * weight.codes.stride(0)
    return fused


@pytest.mark.parametrize("format", FORMATS)
def test_weights_may_be_halves_of_a_fused_tensor(format, rng):
    call = Call.random(rng, format, "a16", (96, 32), 5)
    expected = call.run(CPU)
    fused = replace(call, gate=strided(call.gate, call.up), up=strided(call.up, call.gate))
    assert_same_parts(fused.run(CPU), expected)


def test_mxfp4_with_exponents_far_apart(rng):
    """Subnormal operands, products that underflow, zero blocks above p, bytes 0 and 254."""
    call = Call.random(rng, "mxfp4", "a16", (64, 64), 9)
    scales = torch.randint(40, 136, call.gate.scales.shape, generator=rng).to(torch.uint8)
    gate = replace(call.gate, scales=scales)
    gate.codes[1, 3], gate.scales[1, 3] = 0x80, 254
    low = replace(call.up, scales=torch.randint(0, 90, scales.shape, generator=rng).byte())
    call = replace(call, gate=gate, up=low, x=(call.x * 2.0**-60).bfloat16().float())
    compare(replace(call, swiglu_limit=None, numerics=Numerics(slot="f32")))
    high = replace(call.up, scales=torch.randint(160, 255, scales.shape, generator=rng).byte())
    compare(replace(call, up=high, x=(call.x * 2.0**20).bfloat16().float()))


def test_nvfp4_with_every_scale_byte(rng):
    call = Call.random(rng, "nvfp4", "a16", (128, 64), 7)
    scales = torch.randint(0, 0x7F, call.gate.scales.shape, generator=rng).to(torch.uint8)
    compare(replace(call, gate=replace(call.gate, scales=scales)))


@pytest.mark.parametrize("activation", ["a16", "a8"])
@pytest.mark.parametrize("count", [2, 7])
def test_threads_do_not_change_a_bit(activation, count, rng, monkeypatch):
    monkeypatch.setattr(threads, "WORK_PER_THREAD", 1)
    call = Call.random(rng, "nvfp4", activation, (256, 128), 33)
    monkeypatch.setenv("EXACTMOE_THREADS", "1")
    expected = call.run(CPU)
    monkeypatch.setenv("EXACTMOE_THREADS", str(count))
    assert threads.num_threads() == count
    assert_same_parts(call.run(CPU), expected)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("hidden", "inner"), [(96, 160), (32, 32), (4224, 32), (32, 8224)])
def test_dense_mlp(format, hidden, inner, rng):
    """k above 4096 is cut into segments."""
    weights = tuple(
        one_expert(random_weight(rng, format, 1, *shape))
        for shape in ((inner, hidden), (inner, hidden), (hidden, inner))
    )
    tokens = 2 if max(hidden, inner) > 4096 else 7
    x = torch.randn(tokens, hidden, generator=rng).bfloat16().float()
    x[1, 3] = NAN
    found, expected = torch.empty(tokens, hidden), torch.empty(tokens, hidden)
    h = torch.empty(tokens, inner)
    for path, out in ((CPU, found), (REFERENCE, expected)):
        path.dense_mlp(x, tuple(path.prepare(w) for w in weights), 1.5, h, out)
    assert_same_bits(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_finish(dtype, rng):
    dense = torch.randn(5, 700, generator=rng)
    dense[0, :5] = torch.tensor([NAN, -NAN, INF, -0.0, 1e-40])
    found, expected = torch.empty(5, 700, dtype=dtype), torch.empty(5, 700, dtype=dtype)
    CPU.finish(dense, found)
    REFERENCE.finish(dense, expected)
    assert_same_bits(found, expected)
