"""Calls from several threads, and work on several threads: the same bits."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from exactmoe import Limits
from layers import BACKENDS, assert_same_bits, layer_of, random_bank, random_call


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_threads_call_two_layers(backend, rng):
    layers = [
        layer_of(random_bank(rng, "nvfp4", 4, 64, 32), 2, backend, limits=Limits(max_rows=3)),
        layer_of(random_bank(rng, "mxfp4", 5, 128, 128), 3, backend, numerics="a8"),
    ]
    calls = [random_call(rng, layer, 8) for layer in layers]
    expected = [layer.experts(*call) for layer, call in zip(layers, calls, strict=True)]
    repeats = 40 if backend == "cpu" else 4

    def many(which: int) -> list[torch.Tensor]:
        return [layers[which].experts(*calls[which]) for _ in range(repeats)]

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(many, [0, 1, 0, 1]))
    for which, found in zip([0, 1, 0, 1], results, strict=True):
        for y in found:
            assert_same_bits(y, expected[which])


@pytest.mark.parametrize("numerics", ["a16", "a8"])
@pytest.mark.parametrize("threads", ["1", "2", "3", "7"])
def test_the_number_of_threads_does_not_matter(threads, numerics, rng, monkeypatch):
    layer = layer_of(random_bank(rng, "mxfp4", 6, 256, 128), 3, "cpu", numerics=numerics)
    call = random_call(rng, layer, 40)
    monkeypatch.setenv("EXACTMOE_THREADS", "1")
    expected = layer.experts(*call)
    monkeypatch.setenv("EXACTMOE_THREADS", threads)
    for _ in range(5):
        assert_same_bits(layer.experts(*call), expected)
