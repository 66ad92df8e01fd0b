"""What the documents of sm_90's matrix units do not promise and the contract relies on, measured
with kernels of our own (tests/helpers/wgmma.py).
"""

import pytest
import torch

from exactmoe.formats import PackedWeight
from layers import assert_same_bits
from wgmma import ROWS, WIDTHS, product, source

COLUMNS, TOKENS = 2048, 272


def hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma is an instruction of sm_90")


@pytest.fixture(scope="module")
def operands():
    """w and x over many binades, so that the order of a sum shows, and the product at N = 8."""
    hopper()
    rng = torch.Generator("cuda").manual_seed(7)

    def wide(rows):
        values = torch.randn(rows, COLUMNS, generator=rng, device="cuda")
        powers = torch.randint(-10, 3, (rows, COLUMNS), generator=rng, device="cuda")
        return torch.ldexp(values, powers).bfloat16()

    w, x = wide(ROWS), wide(TOKENS)
    return w, x, product(w, x, 8)


def test_kernels_compile():
    """Also where there is no card: the sources, by NVRTC."""
    pytest.importorskip("cuda.bindings.nvrtc")
    from device_code import compiled

    for made in (source(8), source(136, a_from_registers=True), source(24, first_overwrites=True)):
        assert len(compiled(made)) > 1000


@pytest.mark.gpu
class TestWgmma:
    def test_is_a_dot(self, operands):
        w, x, expected = operands
        true = x.double() @ w.double().T
        error = (expected.double() - true).norm() / true.norm()
        assert 0 < float(error) < 2.0**-17

    @pytest.mark.parametrize("a_from_registers", [False, True])
    @pytest.mark.parametrize("width", WIDTHS)
    def test_every_width_and_either_place_of_a(self, operands, width, a_from_registers):
        w, x, expected = operands
        assert_same_bits(product(w, x, width, a_from_registers), expected)

    @pytest.mark.parametrize("width", [8, 64, 256])
    def test_scale_d_0_is_plus_zero(self, operands, width):
        w, x, expected = operands
        assert_same_bits(product(w, x, width, first_overwrites=True), expected)
        zeros = torch.zeros_like(w)
        assert_same_bits(
            product(zeros, -x, width, first_overwrites=True), torch.zeros_like(expected)
        )

    @pytest.mark.parametrize("width", [8, 128])
    @pytest.mark.parametrize("steps", [1, 4, 7])
    def test_steps_of_zeros_are_neutral(self, operands, width, steps):
        w, x, expected = operands
        padded = (torch.nn.functional.pad(t, (0, 16 * steps)) for t in (w, x))
        assert_same_bits(product(*padded, width), expected)

    @pytest.mark.parametrize("a_from_registers", [False, True])
    def test_subnormal_operands_are_kept(self, a_from_registers):
        hopper()
        # A bf16 of bits m < 128 is m x 2^-133, below the smallest normal one, 2^-126.
        patterns = torch.arange(1, 128, 2, dtype=torch.int16, device="cuda")
        subnormal, big = patterns.view(torch.bfloat16), torch.tensor(2.0**20).bfloat16()
        expected = patterns.float() * 2.0**-113
        zeros = torch.zeros(ROWS, 16, dtype=torch.bfloat16, device="cuda")
        small, large = zeros.clone(), zeros.clone()
        small[:, 0], large[:, 0] = subnormal, big
        found = product(small, large, 8, a_from_registers)
        assert_same_bits(found, expected.expand(ROWS, -1).contiguous())
        found = product(large, small, 64, a_from_registers)
        assert_same_bits(found, expected[:, None].expand(-1, ROWS).contiguous())

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
    @pytest.mark.parametrize("width", [8, 256])
    def test_a_token_with_nan_or_inf_leaves_the_others(self, operands, width, value):
        w, x, expected = operands
        broken = x.clone()
        broken[3, 100] = broken[200, 0] = value
        found = product(w, broken, width)
        assert not torch.isfinite(found[[3, 200]]).any()
        kept = [t for t in range(TOKENS) if t not in (3, 200)]
        assert_same_bits(found[kept], expected[kept])

    def test_the_package_s_kernels_give_these_bits(self, operands):
        """bf16 experts of the portable path: one chain, k ascending."""
        from exactmoe import ops
        from exactmoe.proof.stages import project

        w, x, expected = operands
        weight = PackedWeight("bf16", w[None].contiguous())
        assert_same_bits(project(ops.path("triton"), weight, x), expected)
