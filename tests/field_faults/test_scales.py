"""Field faults of scales, layouts and the activation step: A1, A4, A6, A7, A8."""

import pytest
import torch

from exactmoe import DenseMLP, ExpertBank, MoELayer, Numerics, PackedWeight, Router, RouterConfig
from exactmoe.errors import ConfigError
from layers import (
    BACKENDS,
    CLASSES,
    FORMATS,
    assert_same_bits,
    exact_weight,
    first_column,
    layer_of,
    normal,
    random_bank,
    random_call,
    relative_l2,
    switch_bank,
    true_activation,
    true_experts,
)

WIDE = Numerics(slot="f32", output="f32")


def same_bytes_bank(rng, gate_scale: list[float], up_scale: list[float]) -> ExpertBank:
    """4 experts of the same random bytes, H = 64, I = 32; gate and up differ in global scales."""

    def weight(rows: int, columns: int, scale: list[float]) -> PackedWeight:
        codes = torch.randint(256, (1, rows, columns // 2), generator=rng).to(torch.uint8)
        scales = torch.randint(0x38, 0x48, (1, rows, columns // 16), generator=rng).to(torch.uint8)
        parts = (codes.repeat(4, 1, 1), scales.repeat(4, 1, 1), torch.tensor(scale))
        return PackedWeight("nvfp4", *parts)

    gate = weight(32, 64, gate_scale)
    up = PackedWeight("nvfp4", gate.codes, gate.scales, torch.tensor(up_scale))
    return ExpertBank(gate, up, weight(64, 32, [0.01] * 4))


def each_expert(rng) -> tuple[torch.Tensor, ...]:
    """8 tokens, each to all four experts in turn."""
    x = normal(rng, 8, 64, scale=4.0).repeat(4, 1)
    return x, torch.arange(4).repeat_interleave(8)[:, None].int(), torch.ones(32, 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a1_gate_and_up_keep_their_own_power_of_two_scales(backend, rng):
    small, large = 2.0**-9, 2.0**-6
    bank = same_bytes_bank(rng, [small, small, large, large], [large, large, small, small])
    call = each_expert(rng)
    y = layer_of(bank, 1, backend).experts(*call)
    # Up is linear: with gate's scale for up, the first two would be exactly 8 times smaller.
    small_up = PackedWeight("nvfp4", bank.up.codes, bank.up.scales, torch.full((4,), small))
    other = ExpertBank(bank.gate, small_up, bank.down)
    eighth = layer_of(other, 1, backend).experts(*call)
    assert_same_bits(y[:16], eighth[:16] * 8)
    assert_same_bits(y[16:], eighth[16:])
    assert relative_l2(y, true_experts(bank, *call)) < 2.0**-8


@pytest.mark.parametrize("backend", BACKENDS)
def test_a1_gate_and_up_keep_their_own_scales_that_are_no_powers_of_two(backend, rng):
    low, high = 3.85e-3, 4.83e-3
    call = each_expert(rng)
    for gate, up in (([low] * 4, [low] * 4), ([low, low, high, high], [high, high, low, low])):
        bank = same_bytes_bank(rng.manual_seed(7), gate, up)
        y = layer_of(bank, 1, backend).experts(*call)
        assert relative_l2(y, true_experts(bank, *call)) < 2.0**-8


@pytest.mark.parametrize(
    ("backend", "scale_bytes"),
    [("reference", (0, 1, 2, 22, 126, 127, 128, 134, 253, 254)), ("cpu", tuple(range(255)))],
)
def test_a4_every_e8m0_byte_means_its_power_of_two(backend, scale_bytes):
    """One expert a byte, one row a code: y = code x 2^(byte - 127), as float32 holds it."""
    experts = len(scale_bytes)
    up = torch.zeros(experts, 32)
    up[:, 0] = 1.0
    bank = switch_bank("mxfp4", up, torch.zeros(experts, 32, 32))
    codes = torch.zeros(experts, 32, 16, dtype=torch.uint8)
    codes[:, :, 0] = torch.arange(32) % 16
    scales = torch.tensor(scale_bytes, dtype=torch.uint8)[:, None, None].expand(-1, 32, 1)
    gate = PackedWeight("mxfp4", bank.gate.codes, bank.gate.scales)
    fifth = PackedWeight("mxfp4", bank.up.codes, bank.up.scales - 5)  # h = 32 x 2^-5 = 1
    layer = layer_of(
        ExpertBank(gate, fifth, PackedWeight("mxfp4", codes, scales)), 1, backend, numerics=WIDE
    )
    ids = torch.arange(experts, dtype=torch.int32)[:, None]
    y = layer.experts(first_column(experts, 32), ids, torch.ones(experts, 1))
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    powers = torch.tensor([2.0 ** (byte - 127) for byte in scale_bytes], dtype=torch.float64)
    expected = (values.double().repeat(2) * powers[:, None]).float()
    assert_same_bits(y, expected)
    if 134 in scale_bytes:
        assert float(y[scale_bytes.index(134), 2]) == 128.0
    assert float(y[0, 2]) == 2.0**-127


@pytest.mark.parametrize("name", ["gate", "up", "down"])
def test_a4_a_scale_byte_of_nan_is_refused_with_its_place(name, rng):
    bank = random_bank(rng, "mxfp4", 2, 64, 64)
    scales = getattr(bank, name).scales.clone()
    scales[1, 33, 1] = 0xFF
    with pytest.raises(ConfigError, match="0xFF.*expert 1, row 33, block 1"):
        PackedWeight("mxfp4", getattr(bank, name).codes, scales)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("numerics", CLASSES)
@pytest.mark.parametrize("format", FORMATS)
def test_a6_gate_is_gate_and_up_is_up(format, numerics, backend):
    """y[r] = 32 x v(r), exact; swapped halves would give 32 x silu(v(r))."""
    size = 128
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 6.0])[torch.arange(size) % 5]
    bank = switch_bank(format, values.repeat(2, 1), torch.eye(size).repeat(2, 1, 1))
    layer = layer_of(bank, 1, backend, numerics=numerics)
    y = layer.experts(first_column(3, size), torch.tensor([[0], [1], [0]]), torch.ones(3, 1))
    assert_same_bits(y, (32 * values).bfloat16().expand(3, size))
    one = switch_bank(format, values[None], torch.eye(size)[None])
    dense = DenseMLP(one.gate, one.up, one.down, backend=backend)(first_column(3, size))
    assert_same_bits(dense, (32 * values).bfloat16().expand(3, size))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("format", FORMATS)
def test_a6_the_low_nibble_is_the_even_column(format, backend):
    """Byte 0x71 in down's first byte: 0.5 for h[0], 6 for h[1]."""
    up = torch.zeros(2, 32)
    up[0, 0] = up[1, 1] = 1.0
    bank = switch_bank(format, up, torch.zeros(2, 32, 32))
    codes = bank.down.codes.clone()
    codes[:, :, 0] = 0x71
    down = PackedWeight(format, codes, bank.down.scales, bank.down.global_scale)
    layer = layer_of(ExpertBank(bank.gate, bank.up, down), 1, backend)
    y = layer.experts(first_column(2, 32), torch.tensor([[0], [1]]), torch.ones(2, 1))
    assert_same_bits(y, torch.tensor([[16.0], [192.0]]).bfloat16().expand(2, 32))


GATES = (-50.0, -10.5, -9.0, 9.0, 10.0, 10.5, 50.0)
UPS = (-50.0, -10.5, -10.0, -9.0, 9.0, 10.0, 50.0)


def forty_nine_cells(size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x whose columns 0 + 1 make the gate and 2 + 3 make the up, each e4m3-exact; gates; ups."""
    gate, up = torch.cartesian_prod(torch.tensor(GATES), torch.tensor(UPS)).T
    x = torch.zeros(49, size)
    x[:, 0], x[:, 2] = torch.trunc(gate / 4) * 4, torch.trunc(up / 4) * 4
    x[:, 1], x[:, 3] = gate - x[:, 0], up - x[:, 2]
    return x.bfloat16(), gate.double(), up.double()


def cells_bank(format: str, size: int) -> ExpertBank:
    """Gate = x[0] + x[1], up = x[2] + x[3] in row 0; down takes h[0] to every output."""
    gate, up, down = (torch.zeros(1, size, size) for _ in range(3))
    gate[0, 0, :2] = up[0, 0, 2:4] = 1.0
    down[0, :, 0] = 1.0
    return ExpertBank(*(exact_weight(format, part) for part in (gate, up, down)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("limit", [10.0, None])
@pytest.mark.parametrize("format", FORMATS)
def test_a7_the_swiglu_limit_reaches_routed_and_shared_experts(format, limit, backend):
    size = 32
    x, gate, up = forty_nine_cells(size)
    bank = cells_bank(format, size)
    layer = layer_of(bank, 1, backend, swiglu_limit=limit)
    expected = true_activation(gate, up, limit).bfloat16()[:, None].expand(49, size)
    assert_same_bits(layer.experts(x, torch.zeros(49, 1).int(), torch.ones(49, 1)), expected)
    assert float(expected[0, 0]) > 0  # gate -50 is not clamped: silu(-10) x -10 is 4.5e-3
    assert float(expected[0, 0]) < 1e-17
    dense = DenseMLP(bank.gate, bank.up, bank.down, limit, backend=backend)
    assert_same_bits(dense(x), expected)
    # In the whole block with routed experts that give zero, the shared expert alone is seen.
    zero = exact_weight(format, torch.zeros(1, size, size))
    router = Router(torch.zeros(1, size), config=RouterConfig(score="sigmoid"))
    silent = ExpertBank(zero, zero, zero)
    block = MoELayer(layer.config, silent, router, dense, backend=backend)
    assert_same_bits(block(x), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("limit", [10.0, None])
@pytest.mark.parametrize("format", FORMATS)
def test_a7_the_swiglu_limit_in_a8(format, limit, backend):
    """h is e4m3 here, alone in its group: its code has 3 bits behind the leading one."""
    size = 128
    x, gate, up = forty_nine_cells(size)
    layer = layer_of(cells_bank(format, size), 1, backend, swiglu_limit=limit, numerics="a8")
    y = layer.experts(x, torch.zeros(49, 1).int(), torch.ones(49, 1))
    truth = true_activation(gate, up, limit)
    exponent = torch.frexp(truth).exponent - 4  # 4 bits in all
    floor = torch.ldexp(torch.ones(49).double(), torch.full((49,), -31))  # 2^-22 x 2^-9
    step = torch.maximum(torch.ldexp(torch.ones(49).double(), exponent), floor)
    expected = (torch.round(truth / step) * step).bfloat16() + 0.0
    assert_same_bits(y, expected[:, None].expand(49, size))
    assert float(y[3 * 7, 0]) != float(y[5 * 7, 0])  # gate 9 against 10.5


@pytest.mark.parametrize("limit", [-1.0, float("nan"), float("inf"), -float("inf"), True, "10"])
def test_a7_a_limit_that_is_none_is_refused(limit, rng):
    bank = random_bank(rng, "nvfp4", 1, 32, 32)
    with pytest.raises(ConfigError, match="swiglu_limit is"):
        layer_of(bank, 1, swiglu_limit=limit)
    with pytest.raises(ConfigError, match="swiglu_limit is"):
        DenseMLP(bank.gate, bank.up, bank.down, limit)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("numerics", CLASSES)
@pytest.mark.parametrize("format", FORMATS)
def test_a8_rows_and_groups_of_zeros(format, numerics, backend, rng):
    bank = random_bank(rng, format, 3, 256, 128)
    layer = layer_of(bank, 2, backend, numerics=numerics)
    x, ids, weights = random_call(rng, layer, 4)
    x[0] = 0.0
    x[1] = -0.0
    x[2, 128:] = 0.0
    x[3, 32:64] = 0.0
    y = layer.experts(x, ids, weights)
    assert_same_bits(y[:2], torch.zeros(2, 256).bfloat16())
    truth = true_experts(bank, x, ids, weights)
    for token in (2, 3):
        error = relative_l2(y[token], truth[token])
        assert error < (2.0**-7 if numerics == "a16" else 0.1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("numerics", CLASSES)
def test_a8_the_accumulator_is_not_narrowed_before_the_global_scale(numerics, backend):
    """4096 x 6 x 448 = 1.1e7 is beyond float16; times 2^-20 it is 10.5."""
    hidden, inner = 4096, 128
    codes = torch.full((1, inner, hidden // 2), 0x77, dtype=torch.uint8)
    scales = torch.full((1, inner, hidden // 16), 0x7E, dtype=torch.uint8)
    wide = PackedWeight("nvfp4", codes, scales, torch.tensor([2.0**-20]))
    down = torch.zeros(1, hidden, inner)
    down[0, :, 0] = 1.0
    layer = layer_of(
        ExpertBank(wide, wide, exact_weight("nvfp4", down)), 1, backend, numerics=numerics
    )
    x = torch.ones(2, hidden).bfloat16()
    y = layer.experts(x, torch.zeros(2, 1).int(), torch.ones(2, 1))
    pre = torch.tensor(10.5, dtype=torch.float64)
    h = true_activation(pre, pre, None)  # 110.247: bf16 110; e4m3 under the scale 2^-2: 112
    expected = h.bfloat16() if numerics == "a16" else torch.tensor(112.0).bfloat16()
    assert_same_bits(y, expected.expand(2, hidden))
