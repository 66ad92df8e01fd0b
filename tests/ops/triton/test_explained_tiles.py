"""The tiles of `explain` are those of the launches, for classes and formats that change them."""

import pytest
import torch

from exactmoe import Numerics
from exactmoe.kernels.triton import dense_mlp, down, gate_up
from exactmoe.ops.triton.launch import Launch
from gpu_layers import Layer
from triton_device import DEVICE, INTERPRETED

# On the bf16 units, which the portable kernels have everywhere.
A8 = Numerics(activation="a8", units="bf16", slot="f32")
OPS = {
    "gate_up": gate_up.gate_up,
    "down": down.down,
    "dense gate_up": dense_mlp.dense_gate_up,
    "dense down": dense_mlp.dense_down,
}


@pytest.fixture
def launched(monkeypatch):
    """Kernel -> the tiles that it was launched with; nothing runs but the router and the sort."""
    if INTERPRETED:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    found = {}
    run = Launch.run

    def record(launch):
        found.setdefault(launch.kernel, set()).add(launch.tile)
        if launch.kernel not in OPS.values():
            run(launch)

    monkeypatch.setattr(Launch, "run", record)
    return found


@pytest.mark.parametrize("forced", [None, "128"])
@pytest.mark.parametrize(
    ("numerics", "format"), [("a16", "nvfp4"), (A8, "mxfp4"), ("a16", "fp8"), ("a16", "bf16")]
)
def test_what_is_explained_runs(rng, launched, monkeypatch, numerics, format, forced):
    if forced is not None:
        monkeypatch.setenv("EXACTMOE_TILE", forced)
    layer = Layer(format, numerics, hidden=128, inner=128, experts=8, top_k=2).build(
        DEVICE, "triton"
    )
    layer(torch.randn((5, layer.config.hidden_size), generator=rng).bfloat16().to(DEVICE))
    explained = {choice.op: choice.tile for choice in layer.explain(5).tiles}
    assert {op: {tile} for op, tile in explained.items()} == {
        op: launched[kernel] for op, kernel in OPS.items()
    }
    chained = numerics is A8 or format == "fp8"
    assert explained["gate_up"].tokens == (16 if forced is None else 64 if chained else 128)
