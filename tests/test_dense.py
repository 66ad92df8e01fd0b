"""DenseMLP in every format, on both backends: segments of 4096 of k (contract sections 4 and 7)."""

import copy
import pickle

import pytest
import torch
from torch import Tensor

from dense_loops import projected
from exactmoe import DenseMLP, PackedWeight
from exactmoe.errors import ConfigError
from exactmoe.reference.functions import swiglu32
from layers import BACKENDS, assert_same_bits, normal, relative_l2, true_activation, true_values
from paths import random_weight

FORMATS = ("nvfp4", "nvfp4-divide", "mxfp4", "bf16", "fp8")


def parts(rng: torch.Generator, format: str, hidden: int, inner: int) -> dict[str, PackedWeight]:
    sizes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    return {name: random_weight(rng, format, 1, *size) for name, size in sizes.items()}


def expected(weights: dict[str, PackedWeight], x: Tensor, limit: float, segment: int) -> Tensor:
    gate, up = (projected(weights[name], x, segment) for name in ("gate", "up"))
    return projected(weights["down"], swiglu32(gate, up, limit).bfloat16(), segment)


def repeat_segment(weight: PackedWeight) -> None:
    """The second 4096 columns become the first 4096 again."""
    for tensor in (weight.codes, weight.scales):
        if tensor is not None:
            size = tensor.shape[-1] * 4096 // weight.columns
            tensor[..., size : 2 * size] = tensor[..., :size]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("hidden", "inner"), [(8224, 32), (32, 4128)])
def test_segments_of_4096(format, hidden, inner, rng):
    """The first two segments of gate and up cancel and the third is tiny: what one chain would
    leave is seen in h, though h is rounded to bf16. Down shows its low bits as they are.
    """
    weights, x = parts(rng, format, hidden, inner), normal(rng, 1, hidden)
    if hidden > 8192:
        x[:, 4096:8192] = -x[:, :4096]
        x[:, 8192:] *= 2.0**-20
        repeat_segment(weights["gate"])
        repeat_segment(weights["up"])
    right = expected(weights, x, 2.0, segment=4096)
    for backend in BACKENDS:
        mlp = DenseMLP(**weights, swiglu_limit=2.0, backend=backend, output="f32")
        assert_same_bits(mlp(x), right, backend)
    wrong = expected(weights, x, 2.0, segment=max(hidden, inner))
    assert bool((wrong != right).any()), "one chain would give other bits"


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("sizes", [(4096, 32), (160, 288)])
def test_up_to_4096_there_is_one_segment(format, sizes, rng):
    weights, x = parts(rng, format, *sizes), normal(rng, 1, sizes[0])
    right = expected(weights, x, 2.0, segment=10_000)
    for backend in BACKENDS:
        mlp = DenseMLP(**weights, swiglu_limit=2.0, backend=backend, output="f32")
        assert_same_bits(mlp(x), right, backend)


@pytest.mark.parametrize("format", FORMATS)
def test_a_token_has_its_bytes_at_every_width(format, rng):
    weights, x = parts(rng, format, 4128, 288), normal(rng, 9, 4128)
    mlp = DenseMLP(**weights, swiglu_limit=2.0, output="f32")
    y = mlp(x)
    for width in (1, 2, 3, 5):
        assert_same_bits(mlp(x[:width]), y[:width])
        assert_same_bits(mlp(x[-width:]), y[-width:])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("hidden", "inner"), [(1600, 704), (4352, 288), (160, 288)])
def test_output_against_float64(format, hidden, inner, rng):
    """Contract section 8."""
    weights, x = parts(rng, format, hidden, inner), normal(rng, 64, hidden)
    gate, up, down = (true_values(weights[name])[0] for name in ("gate", "up", "down"))
    h = true_activation(x.double() @ gate.T, x.double() @ up.T, None)
    wide = DenseMLP(**weights, output="f32")(x)
    assert relative_l2(wide, h.float().bfloat16().double() @ down.T) < 2.0**-12
    assert relative_l2(wide, h @ down.T) < 2.0**-8.5
    assert relative_l2(DenseMLP(**weights)(x), h @ down.T) < 2.0**-8


CHANGES = [copy.deepcopy, lambda mlp: pickle.loads(pickle.dumps(mlp)), lambda mlp: mlp.bfloat16()]


@pytest.mark.parametrize("change", CHANGES)
def test_fp8_scales_survive_copies_and_casts(change, rng):
    mlp, x = DenseMLP(**parts(rng, "fp8", 144, 272), output="f32"), normal(rng, 3, 144)
    y, bytes_before = mlp(x), mlp.bank.nbytes
    changed = change(mlp)
    assert changed.bank.gate.scales.dtype == torch.float32
    assert changed.bank.nbytes == bytes_before
    assert_same_bits(changed(x), y)


def test_fp8_state_dict_round_trip(rng):
    mlp, x = DenseMLP(**parts(rng, "fp8", 144, 272), output="f32"), normal(rng, 3, 144)
    other = DenseMLP(**parts(rng, "fp8", 144, 272), output="f32")
    assert bool((other(x) != mlp(x)).any())
    other.load_state_dict(mlp.state_dict())
    assert_same_bits(other(x), mlp(x))
    narrow = {name: t.bfloat16() if "scales" in name else t for name, t in mlp.state_dict().items()}
    with pytest.raises(ConfigError, match=r"gate_scales is torch\.bfloat16.*torch\.float32"):
        other.load_state_dict(narrow)


def test_gate_up_and_down_may_have_three_formats(rng):
    weights = parts(rng, "fp8", 288, 160)
    weights["up"] = random_weight(rng, "nvfp4", 1, 160, 288)
    weights["down"] = random_weight(rng, "mxfp4", 1, 288, 160)
    x = normal(rng, 5, 288)
    found, right = (DenseMLP(**weights, backend=b, output="f32")(x) for b in BACKENDS)
    assert_same_bits(found, right)


def test_more_than_one_expert_is_refused(rng):
    weights = parts(rng, "fp8", 144, 272)
    weights["up"] = random_weight(rng, "fp8", 2, 272, 144)
    with pytest.raises(ConfigError, match="up holds 2 experts; a dense MLP takes one"):
        DenseMLP(**weights)
