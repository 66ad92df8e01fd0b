"""Field faults A3, A4, A5 and A8 in class `a8`, with the right values."""

import pytest
import torch

from checkpoint_layouts import DEEPSEEK_WORDS, e8m0_as, hybrid_config, hybrid_tensors
from checkpoint_maker import deepseek_config, deepseek_tensors, write
from exactmoe import ExpertBank, Numerics, PackedWeight
from exactmoe.checkpoint import Checkpoint, audit
from exactmoe.load import load_layer
from layers import (
    BACKENDS,
    assert_same_bits,
    exact_weight,
    first_column,
    layer_of,
    normal,
    random_bank,
    switch_bank,
    true_experts,
)

WIDE = Numerics(activation="a8", slot="f32", output="f32")
SIZE = 128


def test_a3_static_activation_scales_are_unused(tmp_path, rng):
    """Missing of one expert, zero, denormal, NaN: `a8` computes its own scales, bits are equal."""
    tensors = hybrid_tensors(rng)
    x = normal(rng, 6, SIZE)
    whole = load_layer(write(tmp_path / "whole", hybrid_config(), tensors), 1)
    assert whole.numerics.activation == "a8" and whole.bank.formats[0] == "nvfp4"
    expected = whole(x)
    for expert, value in enumerate((None, 0.0, 1e-40, float("nan"))):
        for word in DEEPSEEK_WORDS.values():
            name = f"layers.1.ffn.experts.{expert}.{word}.input_scale"
            if value is None:
                del tensors[name]
            else:
                tensors[name] = torch.tensor(value)
    folder = write(tmp_path / "broken", hybrid_config(), tensors)
    audit(Checkpoint(folder)).require_clean()
    for backend in BACKENDS:
        assert_same_bits(load_layer(folder, 1, backend=backend)(x), expected)


@pytest.mark.parametrize(
    ("backend", "scale_bytes"),
    [("reference", (0, 1, 2, 22, 126, 127, 128, 134, 253, 254)), ("cpu", tuple(range(255)))],
)
def test_a4_every_e8m0_byte_means_its_power_of_two(backend, scale_bytes):
    """One expert a byte, one row a code: y = code x 2^(byte - 127), as float32 holds it."""
    experts = len(scale_bytes)
    up = torch.zeros(experts, SIZE)
    up[:, 0] = 1.0
    bank = switch_bank("mxfp4", up, torch.zeros(experts, SIZE, SIZE))
    codes = torch.zeros(experts, SIZE, SIZE // 2, dtype=torch.uint8)
    codes[:, :, 0] = torch.arange(SIZE) % 16
    scales = torch.tensor(scale_bytes, dtype=torch.uint8)[:, None, None].expand(-1, SIZE, 4)
    fifth = PackedWeight("mxfp4", bank.up.codes, bank.up.scales - 5)  # h = 32 x 2^-5 = 1
    down = PackedWeight("mxfp4", codes, scales.contiguous())
    layer = layer_of(ExpertBank(bank.gate, fifth, down), 1, backend, numerics=WIDE)
    ids = torch.arange(experts, dtype=torch.int32)[:, None]
    y = layer.experts(first_column(experts, SIZE), ids, torch.ones(experts, 1))
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    powers = torch.tensor([2.0 ** (byte - 127) for byte in scale_bytes], dtype=torch.float64)
    expected = (values.double().repeat(SIZE // 16) * powers[:, None]).float()
    assert_same_bits(y, expected)
    assert float(y[0, 2]) == 2.0**-127 and float(y[-1, 7]) == float("inf")


def test_a5_three_dtypes_of_scales_give_the_same_bits(tmp_path, rng):
    tensors, x = deepseek_tensors(rng), normal(rng, 3, SIZE)
    results = []
    for dtype in (torch.float8_e8m0fnu, torch.uint8, torch.float32):
        changed = {
            name: e8m0_as(tensor, dtype) if tensor.dtype == torch.float8_e8m0fnu else tensor
            for name, tensor in tensors.items()
        }
        folder = write(tmp_path / str(dtype), deepseek_config(), changed)
        for backend in BACKENDS:
            layer = load_layer(folder, 1, backend=backend)
            assert layer.numerics.activation == "a8"
            assert layer.bank.gate.scales.dtype == torch.uint8
            results.append(layer(x))
    assert torch.count_nonzero(results[0])
    for found in results[1:]:
        assert_same_bits(found, results[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_a8_zeros_and_the_floor(format, backend, rng):
    """Rows of +0 and -0, groups of zeros beside others, values below the floor of 1e-4: no NaN, and
    a zero is +0.
    """
    bank = random_bank(rng, format, 3, 256, SIZE)
    layer = layer_of(bank, 2, backend, numerics=WIDE)
    x = normal(rng, 5, 256)
    x[0], x[1] = 0.0, -0.0
    x[2, SIZE:] = -0.0
    x[3] = 2.0**-40  # every code is zero: the scale is at least 2^-22
    x[4, :SIZE] = 2.0**-130
    ids = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2], [1, 0]]).int()
    weights = torch.tensor([[0.5, -0.0], [0.0, 1.0], [1.0, 0.5], [1.0, 1.0], [0.25, 0.5]])
    y = layer.experts(x, ids, weights)
    assert_same_bits(y[[0, 1, 3]], torch.zeros(3, 256))
    truth = true_experts(bank, x, ids, weights)
    for token in (2, 4):
        assert float((y[token].double() - truth[token]).norm() / truth[token].norm()) < 0.1


@pytest.mark.parametrize("backend", BACKENDS)
def test_a8_nothing_is_narrowed_before_its_scale(backend):
    """h = 32 x 2^100 and x = 2^100 are far beyond e4m3, bf16 sums and float16: y is exact."""
    up = torch.zeros(1, SIZE)
    up[:, 0] = 1.0
    down = torch.zeros(1, SIZE, SIZE)
    down[0, :, 0] = 1.0
    bank = switch_bank("mxfp4", up, down)
    large = ExpertBank(exact_weight("mxfp4", gate_of(32.0), -97), bank.up, bank.down)
    layer = layer_of(large, 1, backend, numerics=WIDE)
    x = first_column(2, SIZE) * 2.0**100
    y = layer.experts(x, torch.zeros(2, 1).int(), torch.ones(2, 1))
    assert_same_bits(y, torch.full((2, SIZE), 32 * 2.0**100))


def gate_of(value: float) -> torch.Tensor:
    """Gate [1, I, H] whose rows give value x 2^-3 x x[0]."""
    gate = torch.zeros(1, SIZE, SIZE)
    gate[..., 0] = value / 8
    return gate
