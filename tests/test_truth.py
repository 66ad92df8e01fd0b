"""How good, not only how equal: contract section 8, each stage from its own inputs, float64 truth.

The stages are read through the ops of the CPU path. With a global scale of 1 (or 2^p of MXFP4, a
power of two) `down` with f32 slots gives the accumulator of a dot itself.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from exactmoe import ExpertBank, MoELayer, Numerics, PackedWeight, ops
from exactmoe.formats import quantize
from exactmoe.formats.rows import Rows
from exactmoe.runtime.routes import RouteTable
from layers import (
    FORMATS,
    fp8_blocks,
    layer_of,
    normal,
    relative_l2,
    true_activation,
    true_experts,
    true_values,
)

ROWS = 64
SIZES = [(4096, 2048), (2880, 2880), (1600, 704), (96, 160), (32, 32)]
SIZES_A8 = [(4096, 2048), (1024, 384), (128, 128)]
CPU_DOT = 2.0**-20
PATH = ops.path("cpu")
WIDE = Numerics(slot="f32", output="f32")


@dataclass
class Problem:
    """One expert and 64 rows of zero-mean normal data."""

    bank: ExpertBank
    x: Tensor

    def values(self, name: str) -> Tensor:
        """Float64 values of gate, up or down; made anew, for they are 64 MiB at the large sizes."""
        return true_values(getattr(self.bank, name))[0]


def weight(rng: torch.Generator, format: str, rows: int, columns: int) -> PackedWeight:
    """One expert quantised from normal values; for NVFP4 the global scale is the publisher's."""
    values = torch.randn(1, rows, columns, generator=rng) / columns**0.5
    return fp8_blocks(values) if format == "fp8" else quantize(values, format)


_problems: dict[tuple[str, int, int], Problem] = {}


def problem(format: str, hidden: int, inner: int) -> Problem:
    """Made once for each format and size."""
    key = (format, hidden, inner)
    if key not in _problems:
        rng = torch.Generator().manual_seed(hidden + inner)
        gate, up = (weight(rng, format, inner, hidden) for _ in range(2))
        bank = ExpertBank(gate, up, weight(rng, format, hidden, inner))
        _problems[key] = Problem(bank, normal(rng, ROWS, hidden))
    return _problems[key]


def all_to_the_expert(rows: int) -> RouteTable:
    slots = torch.arange(rows)
    return RouteTable(torch.tensor([0, rows]), slots, torch.zeros(1, dtype=torch.int64))


def project(packed: PackedWeight, rows: Rows) -> Tensor:
    """One projection [T, N], float32, not rounded further."""
    found = torch.full((len(rows.values), packed.rows), float("nan"))
    PATH.down(rows, PATH.prepare(packed), all_to_the_expert(len(found)), WIDE, found)
    return found


def accumulator(packed: PackedWeight, rows: Rows) -> tuple[Tensor, Tensor]:
    """The dots alone, with the float64 values they add up: NVFP4's global scale is set to 1."""
    if packed.format == "nvfp4":
        packed = PackedWeight("nvfp4", packed.codes, packed.scales, torch.ones(1))
    return project(packed, rows), true_values(packed)[0]


def quantised(x: Tensor) -> tuple[Rows, Tensor]:
    """`a8` rows, and the float64 values that codes and scales stand for."""
    shape = (len(x), x.shape[1] // 128)
    rows = PATH.quantize(x.float(), Rows(torch.empty(x.shape), torch.empty(shape)))
    return rows, rows.values.double() * rows.scales.double().repeat_interleave(128, -1)


def ulps(found: Tensor, truth: Tensor) -> Tensor:
    """Error in steps of float32 at the truth."""
    _, exponent = torch.frexp(truth)
    step = torch.ldexp(torch.ones_like(truth), (exponent - 1).clamp(min=-126) - 23)
    return (found.double() - truth).abs() / step


CASES = [(format, *size) for format in (*FORMATS, "fp8") for size in SIZES]
CASES_A8 = [(format, *size) for format in FORMATS for size in SIZES_A8]


@pytest.mark.parametrize(("format", "hidden", "inner"), CASES)
def test_f32_dot(format, hidden, inner):
    case = problem(format, hidden, inner)
    rng = torch.Generator().manual_seed(5)
    for packed in (case.bank.gate, case.bank.down):
        x = normal(rng, ROWS, packed.columns)
        found, values = accumulator(packed, Rows(x.float(), None))
        assert relative_l2(found, x.double() @ values.T) < CPU_DOT


@pytest.mark.parametrize(("format", "hidden", "inner"), CASES)
def test_f32_dot_of_any_data(format, hidden, inner):
    """Huge and tiny values and cancellation: the error against the sum of magnitudes."""
    packed = problem(format, hidden, inner).bank.gate
    rng = torch.Generator().manual_seed(6)
    spread = torch.ldexp(
        torch.ones(ROWS, hidden), torch.randint(-12, 13, (ROWS, hidden), generator=rng)
    )
    x = (torch.randn(ROWS, hidden, generator=rng) * spread).bfloat16()
    x[:, 1::2] = -x[:, 0::2]
    found, values = accumulator(packed, Rows(x.float(), None))
    error = (found.double() - x.double() @ values.T).abs()
    bound = 2.0**-21 * (hidden / 16 + 4)
    assert float((error / (x.double().abs() @ values.abs().T)).max()) < bound


@pytest.mark.parametrize(("format", "hidden", "inner"), CASES_A8)
def test_one_a8_projection(format, hidden, inner):
    case = problem(format, hidden, inner)
    rng = torch.Generator().manual_seed(7)
    for name in ("gate", "down"):
        packed = getattr(case.bank, name)
        rows, read = quantised(normal(rng, ROWS, packed.columns))
        error = relative_l2(project(packed, rows), read @ case.values(name).T)
        assert error < 2.0**-12
        assert error < CPU_DOT  # no fp8 units here: chains of exact products in float32


@pytest.mark.parametrize("limit", [None, 1.5])
@pytest.mark.parametrize(("format", "hidden", "inner"), CASES_A8)
def test_activation_before_rounding(format, hidden, inner, limit):
    """`a8` with weight 1 leaves the activation in float32."""
    case = problem(format, hidden, inner)
    rows, _ = quantised(case.x)
    prepared = PATH.prepare(case.bank.gate), PATH.prepare(case.bank.up)
    h = torch.full((ROWS, inner), float("nan"))
    PATH.gate_up(rows, prepared, all_to_the_expert(ROWS), torch.ones(ROWS, 1), limit, h)
    gate, up = (project(packed, rows).double() for packed in (case.bank.gate, case.bank.up))
    assert float(ulps(h, true_activation(gate, up, limit)).max()) <= 4.0


def activation(case: Problem) -> Tensor:
    """Float64 h [T, I] of bf16 rows."""
    x = case.x.double()
    return true_activation(x @ case.values("gate").T, x @ case.values("up").T, None)


def one_call(case: Problem, numerics: Numerics | str) -> Tensor:
    layer: MoELayer = layer_of(case.bank, 1, "cpu", numerics=numerics)
    return layer.experts(case.x, torch.zeros(ROWS, 1, dtype=torch.int32), torch.ones(ROWS, 1))


@pytest.mark.parametrize(("format", "hidden", "inner"), CASES)
def test_whole_slot_and_output(format, hidden, inner):
    case = problem(format, hidden, inner)
    wide, down = activation(case), case.values("down")
    truth = wide @ down.T
    slot = one_call(case, WIDE)
    assert relative_l2(slot, wide.float().bfloat16().double() @ down.T) < 2.0**-12
    assert relative_l2(slot, truth) < 2.0**-8.5
    assert relative_l2(one_call(case, "a16"), truth) < 2.0**-8


@pytest.mark.parametrize("format", FORMATS)
def test_output_of_several_experts(format):
    """Top 3 of 4 experts and the combine, in the small sizes."""
    rng = torch.Generator().manual_seed(8)
    sizes = ((160, 96), (160, 96), (96, 160))
    parts = [
        quantize(torch.randn(4, *size, generator=rng) / size[1] ** 0.5, format) for size in sizes
    ]
    bank = ExpertBank(*parts)
    x = normal(rng, 2 * ROWS, 96)
    ids = torch.rand(2 * ROWS, 4, generator=rng).argsort(-1)[:, :3].int()
    weights = torch.rand(2 * ROWS, 3, generator=rng)
    truth = true_experts(bank, x, ids, weights)
    assert relative_l2(layer_of(bank, 3, "cpu").experts(x, ids, weights), truth) < 2.0**-8


@pytest.mark.parametrize(("format", "hidden", "inner"), CASES_A8)
def test_whole_a8_expert_is_reported(format, hidden, inner, record_property):
    """Not bounded by the contract (codes of h flip); measured 4.5 to 4.8 %."""
    case = problem(format, hidden, inner)
    error = relative_l2(one_call(case, "a8"), activation(case) @ case.values("down").T)
    record_property("relative_l2", error)
    assert error < 2.0**-4
