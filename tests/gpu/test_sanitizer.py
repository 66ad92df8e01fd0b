"""A short run of every kernel, for compute-sanitizer (tests/gpu/sanitize.sh), with its bits.

Under the sanitizer a kernel takes a hundred times longer, so sizes and widths are small: one token,
a few rows, and more rows than the narrowest tile has.
"""

import pytest
import torch

from card_layers import on_cards, ways
from exactmoe import Numerics
from exactmoe.bank import Partition
from exactmoe.proof.backends import canonical_twin, paths_of
from gpu_layers import Layer, call, dense, generator, token_ids
from layers import assert_same_bits

WIDTHS = (1, 3, 40)
LAYERS = {
    "a16 nvfp4": Layer(experts=4, top_k=2),
    "a16 nvfp4 divided": Layer("nvfp4-divide", experts=4, top_k=2, limit=None),
    "a16 mxfp4 hash": Layer("mxfp4", experts=4, top_k=2, hashed=True, shared="mxfp4"),
    "a16 bf16, f32": Layer("bf16", Numerics(slot="f32", output="f32"), experts=4, top_k=2),
    "a16 nvfp4, sizes 96 and 160": Layer(hidden=96, inner=160, experts=3, top_k=2),
    "a8 mxfp4": Layer("mxfp4", "a8", experts=4, top_k=2, shared="fp8"),
    "a8 nvfp4 hash": Layer("nvfp4", "a8", experts=4, top_k=2, hashed=True, shared="nvfp4"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_every_path_of_a_layer(device, name):
    layer = LAYERS[name].build(device)
    for path in paths_of(layer):
        twin = layer if path == layer.plan().backend else canonical_twin(layer, path)
        for tokens in WIDTHS:
            x, ids, weights = call(layer, tokens)
            ids[-1, 0], ids[0, 1] = -1, layer.config.num_experts
            y = twin.experts(x, ids, weights)
            assert_same_bits(y, layer.experts(x, ids, weights), f"{path}, {tokens} tokens")
            given = token_ids(layer, tokens)
            assert_same_bits(twin(x, given), layer(x, given), f"{path}, {tokens} tokens, block")
            assert torch.isfinite(y).all()


@pytest.mark.parametrize("format", ["bf16", "nvfp4", "mxfp4", "fp8"])
def test_dense(device, format):
    layer = dense(generator(device), format, 96, 4256 if format == "bf16" else 160)
    for tokens in WIDTHS:
        rng = generator(device, tokens)
        x = torch.randn(tokens, 96, generator=rng, device=device).bfloat16()
        assert_same_bits(layer(x)[-1:], layer(x[-1:].clone()))


@pytest.mark.parametrize("name", ["a16 nvfp4", "a8 mxfp4"])
def test_two_cards(device, name):
    """Two streams of the card: lookups, slots that are taken, vectors, counts."""
    layer = LAYERS[name].build(device)
    for partition in (Partition.even(4, 2), Partition((0, 1, 0, 1))):
        for returns in ways(partition):
            cards = on_cards(layer, partition, returns, names=(device,), limits=layer.limits)
            for tokens in WIDTHS:
                x, ids, weights = call(layer, tokens)
                ids[-1, 0] = -1
                assert_same_bits(cards.experts(x, ids, weights), layer.experts(x, ids, weights))
            cards.check()
