"""The proof of a cast finds a wrong one: codes, block scales and global scales."""

import pytest
import torch

from exactmoe.checkpoint.rewrite.casts import exact_cast, prove_equal
from exactmoe.errors import BitMismatch
from exactmoe.formats import PackedWeight


def mxfp4(rng: torch.Generator) -> PackedWeight:
    codes = torch.randint(0, 256, (1, 8, 32), generator=rng).to(torch.uint8)
    codes[0, 3, :16] = 0x80  # a block of zeros, some of them negative
    scales = torch.randint(110, 125, (1, 8, 2), generator=rng).to(torch.uint8)
    return PackedWeight("mxfp4", codes, scales)


@pytest.mark.parametrize("field", ["codes", "scales", "global_scale"])
def test_a_wrong_cast_is_found(rng: torch.Generator, field: str) -> None:
    before = mxfp4(rng)
    after = exact_cast(before, "nvfp4")
    assert after is not None
    prove_equal(before, after, "x")
    value = getattr(after, field).clone()
    if field == "global_scale":
        value *= 2
    else:
        value[0, 5, 2] ^= 8
    fields = {name: getattr(after, name) for name in ("codes", "scales", "global_scale")}
    wrong = PackedWeight("nvfp4", **{**fields, field: value})
    with pytest.raises(BitMismatch, match="x: the cast to nvfp4 changed a value"):
        prove_equal(before, wrong, "x")


def test_a_sign_of_zero_counts(rng: torch.Generator) -> None:
    before = mxfp4(rng)
    after = exact_cast(before, "nvfp4")
    assert after is not None
    codes = after.codes.clone()
    codes[0, 3, 0] = 0
    with pytest.raises(BitMismatch):
        prove_equal(before, PackedWeight("nvfp4", codes, after.scales, after.global_scale), "x")


def test_there_and_back(rng: torch.Generator) -> None:
    before = mxfp4(rng)
    there = exact_cast(before, "nvfp4")
    assert there is not None
    back = exact_cast(there, "mxfp4")
    assert back is not None and before.scales is not None and back.scales is not None
    prove_equal(there, back, "x")
    assert torch.equal(back.codes, before.codes)
    counted = torch.ones(8, 2, dtype=torch.bool)
    counted[3, 0] = False
    assert torch.equal(back.scales[0][counted], before.scales[0][counted])
