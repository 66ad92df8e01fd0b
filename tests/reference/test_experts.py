"""One routed expert and the dense MLP, step by step with other code (contract sections 2 to 7)."""

import numpy as np
import pytest
import torch

from exactmoe import Numerics, PackedWeight
from exactmoe.formats.rows import Rows
from exactmoe.reference import (
    as_rows,
    dense_mlp,
    dot,
    dot_dense,
    dot_scaled,
    down,
    expert_slots,
    gate_up,
    project,
    quantize,
)
from exactmoe.reference.functions import swiglu32
from layers import FORMATS, assert_same_bits, exact_weight, normal, random_bank, true_values

A16, A8 = Numerics(), Numerics.preset("a8")
NAN = float("nan")


def e4m3(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.float8_e4m3fn).float()


@pytest.mark.parametrize("format", FORMATS)
def test_project_multiplies_the_scale_once_at_the_end(format, rng):
    bank = random_bank(rng, format, 2, 128, 32)
    rows = Rows(normal(rng, 3, 128).float(), None)
    for expert in range(2):
        values = true_values(bank.gate)[expert]
        if format == "nvfp4":
            scale = bank.gate.global_scale[expert]
            operand = (values / scale.double()).float()
        else:
            exponents = bank.gate.scales[expert].int() - 127
            scale = torch.tensor(2.0 ** int(exponents.max()))
            operand = (values / scale.double()).float()
        assert_same_bits(operand.bfloat16().float(), operand)  # the dot reads exact bf16
        expected = dot(operand, rows.values) * scale
        assert_same_bits(project(bank.gate, expert, rows), expected)


def test_a_global_scale_that_divides_is_divided_by():
    weight = exact_weight("nvfp4", torch.full((1, 1, 16), 1.0))
    kept = PackedWeight("nvfp4", weight.codes, weight.scales, torch.tensor([11.0]), "divide")
    rows = Rows((torch.arange(16) < 13).float()[None], None)
    found = project(kept, 0, rows)
    assert float(found) == float(np.float32(13) / np.float32(11))
    other = np.float32(13) * (np.float32(1) / np.float32(11))
    assert float(found) != float(other)


@pytest.mark.parametrize("limit", [None, 0.5])
def test_gate_up_of_a16_rounds_h_once(limit, rng):
    bank = random_bank(rng, "nvfp4", 1, 64, 32)
    rows = as_rows(normal(rng, 4, 64), A16)
    assert rows.scales is None
    h = gate_up(rows, bank.gate, bank.up, 0, limit, None)
    wide = swiglu32(project(bank.gate, 0, rows), project(bank.up, 0, rows), limit)
    assert_same_bits(h, wide.bfloat16().float())


def test_gate_up_of_a8_multiplies_by_the_weight_and_does_not_round(rng):
    bank = random_bank(rng, "mxfp4", 1, 128, 32)
    x = normal(rng, 4, 128)
    rows = as_rows(x, A8)
    codes, scales = quantize(x)
    assert_same_bits(rows.values, e4m3(codes))
    assert_same_bits(rows.scales, scales)
    weights = torch.rand(4, generator=rng)
    h = gate_up(rows, bank.gate, bank.up, 0, None, weights)
    wide = swiglu32(project(bank.gate, 0, rows), project(bank.up, 0, rows), None)
    assert_same_bits(h, wide * weights[:, None])
    assert bool((h != h.bfloat16().float()).any())


def test_a8_projection_is_chains_of_128(rng):
    bank = random_bank(rng, "mxfp4", 1, 256, 32)
    rows = as_rows(normal(rng, 3, 256), A8)
    scale = 2.0 ** int(bank.gate.scales.max().int() - 127)
    operand = (true_values(bank.gate)[0] / scale).float()
    expected = dot_scaled(operand, rows.values, rows.scales) * scale
    assert_same_bits(project(bank.gate, 0, rows), expected)


def test_down_rounds_slots_where_numerics_say_so(rng):
    bank = random_bank(rng, "nvfp4", 1, 64, 32)
    h = as_rows(normal(rng, 3, 32), A16)
    wide = project(bank.down, 0, h)
    assert_same_bits(down(h, bank.down, 0, A16), wide.bfloat16().float())
    assert_same_bits(down(h, bank.down, 0, Numerics(slot="f32")), wide)


@pytest.mark.parametrize("numerics", [A16, A8], ids=["a16", "a8"])
def test_expert_slots_one_slot_at_a_time(numerics, rng):
    bank = random_bank(rng, "mxfp4", 3, 128, 128)
    x = normal(rng, 3, 128)
    ids = torch.tensor([[0, 2], [-1, 1], [3, 2]])
    weights = torch.rand(3, 2, generator=rng)
    slots = expert_slots(x, ids, weights, (bank.gate, bank.up, bank.down), 2.0, numerics)
    for t, k in ((0, 0), (0, 1), (1, 1), (2, 1)):
        expert = int(ids[t, k])
        weight = None if numerics == A16 else weights[t, k : k + 1]
        h = gate_up(as_rows(x[t : t + 1], numerics), bank.gate, bank.up, expert, 2.0, weight)
        assert_same_bits(slots[t, k], down(as_rows(h, numerics), bank.down, expert, numerics)[0])
    assert not slots[1, 0].any() and not slots[2, 0].any()  # absent


def test_a_nan_in_x_stays_in_its_token_and_is_the_one_nan(rng):
    bank = random_bank(rng, "mxfp4", 1, 128, 128)
    x = normal(rng, 3, 128)
    clean = x.clone()
    x[1, 5] = NAN
    x[1, 6] = -NAN
    for numerics in (A16, A8):
        call = (torch.zeros(3, 1).int(), torch.ones(3, 1), (bank.gate, bank.up, bank.down), None)
        found = expert_slots(x, *call, numerics)
        assert_same_bits(found[[0, 2]], expert_slots(clean, *call, numerics)[[0, 2]])
        assert (found[1].view(torch.int32) == 0x7FC00000).all()


@pytest.mark.parametrize("format", [*FORMATS, "bf16"])
def test_dense_mlp_step_by_step(format, rng):
    hidden, inner = 4128, 64  # more than a segment
    if format == "bf16":
        sizes = ((inner, hidden), (inner, hidden), (hidden, inner))
        parts = [PackedWeight("bf16", normal(rng, 1, *size, scale=0.05)) for size in sizes]
    else:
        bank = random_bank(rng, format, 1, hidden, inner)
        parts = [bank.gate, bank.up, bank.down]
    x = normal(rng, 2, hidden)

    def one(weight: PackedWeight, rows: torch.Tensor) -> torch.Tensor:
        scale = torch.ones(())
        if format == "nvfp4":
            scale = weight.global_scale[0]
        elif format == "mxfp4":
            scale = torch.tensor(2.0 ** int(weight.scales.int().max() - 127))
        operand = (true_values(weight)[0] / scale.double()).float()
        return dot_dense(operand, rows.float()) * scale

    h = swiglu32(one(parts[0], x), one(parts[1], x), 1.0).bfloat16()
    assert_same_bits(dense_mlp(x, *parts, 1.0), one(parts[2], h))
