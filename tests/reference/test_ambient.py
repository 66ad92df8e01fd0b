"""A caller's torch defaults (dtype, device) change nothing inside a call."""

import pytest
import torch

from exactmoe import DenseMLP, MoEConfig, MoELayer, Router, RouterConfig, quantize_experts
from layers import BACKENDS, assert_same_bits


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("numerics", ["a16", "a8"])
@pytest.mark.parametrize("hashed", [False, True])
def test_torch_defaults_around_a_call_change_nothing(backend, numerics, hashed, rng):
    def normal(*size):
        return torch.randn(*size, generator=rng) / 8

    bank = quantize_experts(
        normal(8, 128, 128), normal(8, 128, 128), normal(8, 128, 128), format="mxfp4"
    )
    router = Router(
        normal(8, 128).bfloat16(),
        bias=None if hashed else normal(8),
        table=torch.arange(12).view(6, 2) % 8 if hashed else None,
        config=RouterConfig("sigmoid", 2.5),
    )
    shared = DenseMLP(*(normal(128, 128).bfloat16() for _ in range(3)), backend=backend)
    config = MoEConfig(128, 128, 8, 2, 10.0, numerics)
    layer = MoELayer(config, bank, router, shared, backend=backend)
    x, token_ids = normal(5, 128).bfloat16(), torch.arange(5)
    expected = layer(x, token_ids)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            found = layer(x, token_ids)
    finally:
        torch.set_default_dtype(before)
    assert found.dtype == torch.bfloat16
    assert_same_bits(found, expected)
