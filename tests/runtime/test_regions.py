"""Regions of class a8 by Storage.units: names, shapes, types and the closed form of their bytes."""

import pytest
import torch

from exactmoe import MoEConfig, Numerics, ops
from exactmoe.routed import expert_regions
from exactmoe.runtime.workspace import total_bytes

EXPERTS, TOP_K, HIDDEN, INNER = 12, 3, 256, 512
BF16, E4M3, F32, I32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.int32
UNITS = ("auto", "bf16", "fp8")
PATHS = {"auto": "cuda_a8", "bf16": "cuda_a8_bf16", "fp8": "cuda_a8_fp8"}


def config(units: str) -> MoEConfig:
    numerics = Numerics(activation="a8", units=units, slot="f32")
    return MoEConfig(HIDDEN, INNER, EXPERTS, TOP_K, numerics=numerics)


def regions(units: str, rows: int, experts: int = EXPERTS):
    pytest.importorskip("triton")
    storage = ops.path(PATHS[units]).storage
    assert storage.units == units
    return expert_regions(config(units), experts, rows, storage)


@pytest.mark.parametrize("rows", [1, 7, 64])
@pytest.mark.parametrize("units", UNITS)
def test_what_is_kept(units, rows):
    """h and packed x: scales always, codes where an expert may be on the fp8 units, bf16 where one
    may be on the bf16 units; each expert's rows begin a new eight.
    """
    slots = rows * TOP_K
    packed = 8 * (slots // 8 + EXPERTS)
    expected = {
        "offsets": ((EXPERTS + 1,), I32),
        "sorted": ((slots,), I32),
        "slots": ((slots, HIDDEN), F32),
    }
    for name, columns in (("h", INNER), ("packed", HIDDEN)):
        expected[f"{name}_scales"] = ((packed, columns // 128), F32)
        if units != "bf16":
            expected[f"{name}_codes"] = ((packed, columns), E4M3)
        if units != "fp8":
            expected[f"{name}_wide"] = ((packed, columns), BF16)
    found = {region.name: (region.shape, region.dtype) for region in regions(units, rows)}
    assert found == expected


@pytest.mark.parametrize(("units", "bytes_of_a_value"), [("auto", 3), ("bf16", 2), ("fp8", 1)])
def test_bytes_are_the_closed_form(units, bytes_of_a_value):
    """A number of rows and of experts that needs no padding to 64 bytes."""
    rows, experts = 64, 15
    slots = rows * TOP_K
    packed = 8 * (slots // 8 + experts)
    values = packed * (HIDDEN + INNER) * bytes_of_a_value
    scales = packed * (HIDDEN + INNER) // 128 * 4
    table = 4 * (experts + 1) + 4 * slots
    expected = values + scales + table + 4 * slots * HIDDEN
    assert total_bytes(regions(units, rows, experts)) == expected


def test_of_few_tokens_the_experts_decide():
    """Eights of rows are counted for every expert of the card, in use or not."""
    few, many = (
        {r.name: r.shape[0] for r in regions("fp8", 1, experts)}["h_codes"] for experts in (1, 256)
    )
    assert (few, many) == (8, 8 * 256)


def test_units_of_a_path_without_packed_rows():
    """The portable path quantises h by itself, rows at the slots' places."""
    found = {r.name: r.shape for r in expert_regions(config("auto"), EXPERTS, 5, ops.DEVICE)}
    slots = 5 * TOP_K
    assert found["h"] == found["h_codes"] == (slots, INNER)
    assert found["h_scales"] == (slots, INNER // 128)
    assert not [name for name in found if "packed" in name or "wide" in name]
    a16 = MoEConfig(HIDDEN, INNER, EXPERTS, TOP_K)
    names = {r.name: r.shape for r in expert_regions(a16, EXPERTS, 5, ops.PACKED)}
    rows = ops.PACKED.rows_of_h(slots, EXPERTS)
    assert names["h"] == (rows, INNER) and names["packed_x"] == (rows, HIDDEN)
    assert set(names) == {"offsets", "sorted", "slots", "h", "packed_x"}
