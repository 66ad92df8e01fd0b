"""All 16 codes beside every scale byte, through the kernels of every path: each value is exact.

A one-hot x reads one column of gate and up. Where the other projections are 32, 1 and the identity,
what comes out is one operand of the projection under test, and no order of a sum matters.
"""

import pytest
import torch
from torch import Tensor

from exactmoe import ExpertBank, Numerics
from exactmoe.errors import Unsupported
from exactmoe.formats import PackedWeight
from exactmoe.formats.scales import decode_e4m3
from exactmoe.proof.backends import canonical_twin, paths_of
from exactmoe.reference.functions import canonical, swiglu32, to_bf16
from layers import E2M1, assert_same_bits, exact_weight, layer_of

BLOCK = {"nvfp4": 16, "mxfp4": 32}
# E8M0 may span 96 binades in one projection; up to byte 245 32 x 6 x 2^n stays finite.
WINDOWS = {
    "nvfp4": ("nvfp4", torch.cat([torch.arange(127), torch.arange(1)])),
    "mxfp4 from 0": ("mxfp4", torch.arange(0, 96)),
    "mxfp4 from 80": ("mxfp4", torch.arange(80, 176)),
    "mxfp4 from 150": ("mxfp4", torch.arange(150, 246)),
    "mxfp4 to 254": ("mxfp4", torch.arange(159, 255)),
}
WIDE = Numerics(slot="f32", output="f32")


def codes_of(size: int) -> Tensor:
    """Int64 [K, K]: row r has code (k + r) mod 16 at k."""
    return (torch.arange(size) + torch.arange(size)[:, None]) % 16


def every_code(format: str, scales: Tensor) -> tuple[PackedWeight, Tensor]:
    """[1, K, K] with every code beside every scale byte; its float64 values [K, K]."""
    size = len(scales) * BLOCK[format]
    codes = codes_of(size)
    packed = (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8)[None]
    rows = scales.to(torch.uint8).expand(1, size, -1).contiguous()
    if format == "nvfp4":
        values = decode_e4m3(scales.to(torch.uint8)).double()
        weight = PackedWeight("nvfp4", packed, rows, torch.ones(1))
    else:
        values = torch.ldexp(torch.ones(len(scales)).double(), scales - 127)
        weight = PackedWeight("mxfp4", packed, rows)
    return weight, E2M1[codes] * values.repeat_interleave(BLOCK[format])


def bank_with(name: str, format: str, weight: PackedWeight) -> ExpertBank:
    """The weight as `name`; gate is 32 and up is 1 everywhere or on the diagonal, as down is."""
    size = weight.rows
    ones, identity = torch.ones(1, size, size), torch.eye(size)[None]
    of_h = identity if name == "down" else ones
    parts = {
        "gate": exact_weight(format, 4.0 * of_h, 3),
        "up": exact_weight(format, of_h),
        "down": exact_weight(format, identity),
    }
    return ExpertBank(**(parts | {name: weight}))


def expected(name: str, values: Tensor) -> Tensor:
    """y float32 [T, K] of one-hot rows that read `values`, by the contract's fixed functions."""
    operand = values.float() + 0.0  # a sum from +0 is never -0
    if name == "down":
        return canonical(32.0 * operand)
    one = torch.ones_like(operand)
    h = swiglu32(operand, one, None) if name == "gate" else swiglu32(32.0 * one, operand, None)
    return canonical(to_bf16(h).float() + 0.0)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", ["gate", "up", "down"])
def test_every_code_and_scale_byte(device, name, window):
    if name != "down" and window == "mxfp4 to 254":
        pytest.skip("h would be Inf, and Inf x 0 in down is NaN")
    format, scales = WINDOWS[window]
    if device == "cpu" and (name != "down" or window == "mxfp4 from 80"):
        pytest.skip("tests/formats and tests/ops have every code on the CPU")
    weight, values = every_code(format, scales)
    size = weight.columns
    layer = layer_of(bank_with(name, format, weight).to(device), 1, "auto", numerics=WIDE)
    columns = torch.arange(0, size, 1 if device == "cuda" else size // 24 + 1)
    x = torch.eye(size, dtype=torch.bfloat16)[columns].to(device)
    ids = torch.zeros(len(x), 1, dtype=torch.int32, device=device)
    weights = torch.ones(len(x), 1, device=device)
    wanted = expected(name, values.T[columns].contiguous())
    for path in paths_of(layer):
        twin = layer if path == layer.plan().backend else canonical_twin(layer, path)
        assert_same_bits(twin.experts(x, ids, weights).cpu(), wanted, path)


def test_wider_windows_are_refused():
    with pytest.raises(Unsupported, match="binades"):
        every_code("mxfp4", torch.arange(0, 128))
