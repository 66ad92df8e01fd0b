"""The check of registers in flight sees what it is for."""

import pytest

from cuda_code import Code
from in_flight import overwritten

GMMA = "QGMMA.64x8x32.F32.E4M3.E4M3 R24, R28, gdesc[UR8], RZ, !UPT, gsb0"
WAIT, LOAD, OTHER = "WARPGROUP.DEPBAR.LE gsb0, 0x0", "LDS.128 R28, [R54]", "LDS.128 R32, [R54]"


def code(*main: str) -> Code:
    addresses = tuple(16 * place for place in range(len(main)))
    return Code(main, addresses, (), 0, 64, 0, 0)


@pytest.mark.parametrize("write", [LOAD, "PRMT R31, R13, 0x4440, RZ", "IMAD.WIDE R30, R1, R2, R4"])
def test_a_write_before_the_wait_is_found(write):
    assert overwritten(code(GMMA, write, WAIT)) == [f"{GMMA} | {write}"]
    assert overwritten(code(GMMA, "BRA P0, 0x100", write, WAIT)) == [f"{GMMA} | {write}"]


def test_a_write_around_the_loop_is_found():
    assert overwritten(code(LOAD, GMMA, "BRA P0, 0x0", WAIT)) == [f"{GMMA} | {LOAD}"]


@pytest.mark.parametrize("after", [(WAIT, LOAD), (OTHER, WAIT), ("STS.128 [R28], R28", WAIT)])
def test_what_is_right_is_not_named(after):
    assert overwritten(code(GMMA, *after)) == []


def test_an_older_group_alone_is_waited_for():
    """DEPBAR 1 leaves the newest group on its way."""
    one = WAIT.replace("0x0", "0x1")
    assert overwritten(code(GMMA, one, LOAD)) == [f"{GMMA} | {LOAD}"]
