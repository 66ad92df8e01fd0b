"""exact_rows: where a multiply and an add may be one fma, and that the range is needed."""

import numba
import numpy as np
import pytest

from exactmoe import ops
from exactmoe.config import Numerics
from exactmoe.kernels.cpu.exact import exact_rows
from layers import assert_same_bits
from paths import Call


@pytest.mark.parametrize(
    ("value", "inside"),
    [
        (0.0, True),
        (-0.0, True),
        (2.0**-40, True),
        (-(2.0**-40), True),
        (2.0**-40 * (1 - 2.0**-8), False),
        (2.0**64, True),
        (2.0**64 * (1 + 2.0**-7), False),
        (1e-45, False),
        (float("inf"), False),
        (-float("inf"), False),
        (float("nan"), False),
    ],
)
def test_range(value, inside):
    values = np.ones((3, 20), np.float32)
    values[1, 19] = value
    exact = np.zeros(3, np.bool_)
    numba.njit(lambda v, e: exact_rows(v, e))(values, exact)
    assert exact.tolist() == [True, inside, True]


@pytest.mark.parametrize("value", [2.0**-133, 2.0**-126, 2.0**-100, 2.0**100, 2.0**127])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "bf16"])
def test_rows_outside_of_the_range_have_the_reference_bytes(value, format, rng):
    call = Call.random(rng, format, "a16", (64, 32), 9)
    call.numerics, call.swiglu_limit = Numerics(slot="f32"), None
    call.x[::2] *= value
    call.x = call.x.bfloat16().float()
    found, expected = call.run(ops.path("cpu")), call.run(ops.path("reference"))
    assert_same_bits(found["h"], expected["h"])
    assert_same_bits(found["slots"], expected["slots"])
