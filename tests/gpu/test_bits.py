"""The whole verify matrix: widths to 8192, captured and eager, streams, threads, poisoned memory,
every tile, every path, and the stages against the reference and float64.
"""

import pytest

from exactmoe import Numerics
from exactmoe.proof import verify
from exactmoe.proof.dimensions import DIMENSIONS
from gpu_layers import Layer, dense, generator

WIDE = Numerics(slot="f32", output="f32")
A8_WIDE = Numerics(activation="a8", units="auto", slot="f32", output="f32")
QUICK = {
    "a16 nvfp4": Layer(),
    "a8 mxfp4 hash": Layer("mxfp4", "a8", hashed=True),
    "a16 bf16": Layer("bf16", WIDE),
}
MORE = {
    "a16 mxfp4 hash, f32": Layer("mxfp4", WIDE, hashed=True),
    "a16 nvfp4 divided, no limit": Layer("nvfp4-divide", limit=None, shared=None),
    "a8 nvfp4, f32": Layer("nvfp4", A8_WIDE),
    "a16 nvfp4, sizes 96 and 160": Layer(hidden=96, inner=160),
    "a16 mxfp4, sizes 96 and 160": Layer("mxfp4", hidden=96, inner=160),
    "a16 nvfp4, 288 experts": Layer(experts=288, top_k=8),
    "a16 nvfp4, shared nvfp4": Layer(shared="nvfp4"),
}
CPU_WIDTHS = (1, 9, 65)
# What a GPU's report may leave out: threads compute nothing there, and a layer may have one path.
CANNOT = {"threads", "backend", "ranks"}


def proved(layer, device, **settings):
    widths = {} if device == "cuda" else {"widths": CPU_WIDTHS}
    report = verify(layer, repeats=5, **widths, **settings)
    report.raise_on_mismatch()
    return report


# A GPU runs all of them, whatever their marks; `make test` has each class and chain in QUICK.
more = (pytest.param(name, marks=[pytest.mark.slow, pytest.mark.long]) for name in MORE)


@pytest.mark.parametrize("name", [*QUICK, *more])
def test_layer(device, name):
    report = proved((QUICK | MORE)[name].build(device), device)
    if device == "cuda":
        assert set(report.not_run) <= CANNOT
        assert set(report.dimensions) | set(report.not_run) >= set(DIMENSIONS)
        assert any("gate dot" in bound for bound in report.bounds)
        assert any("router dot" in bound for bound in report.bounds)


@pytest.mark.parametrize(
    ("format", "hidden", "inner"),
    [
        ("bf16", 256, 512),
        pytest.param("nvfp4", 256, 4352, marks=pytest.mark.slow),
        pytest.param("mxfp4", 256, 4352, marks=pytest.mark.slow),
        pytest.param("fp8", 256, 4352, marks=pytest.mark.slow),
        pytest.param("bf16", 4096, 12288, marks=pytest.mark.slow),
    ],
)
def test_dense(device, format, hidden, inner):
    if device == "cpu" and inner > 1000:
        pytest.skip("a CPU takes minutes")
    report = proved(dense(generator(device), format, hidden, inner), device)
    if device == "cuda":
        assert set(report.not_run) <= CANNOT | {"cards"}  # a dense MLP runs on one
        assert any("dense down dot" in bound for bound in report.bounds)


@pytest.mark.gpu
def test_large_layer():
    """GLM's sizes with 32 experts, at the borders of tiles and the width of a prefill."""
    layer = Layer(hidden=4096, inner=2048, experts=32, top_k=8).build("cuda")
    report = verify(layer, widths=(1, 8, 9, 65, 257, 8192), repeats=2)
    report.raise_on_mismatch()
    assert set(report.not_run) <= CANNOT


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_glm_layer(format):
    """All 288 experts: `verify` of one such layer takes at most a minute."""
    layer = Layer(format, hidden=4096, inner=2048, experts=288, top_k=8).build("cuda")
    report = verify(layer)
    report.raise_on_mismatch()
    assert report.seconds < 60
