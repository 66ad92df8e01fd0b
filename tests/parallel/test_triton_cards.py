"""Two cards on the kernels of a GPU, interpreted: e4m3 codes, bf16 rows and slots, int32 tables."""

import pytest
import torch

from card_layers import on_cards
from exactmoe import Limits
from exactmoe.bank import Partition
from exactmoe.errors import ConfigError, Unsupported
from layers import assert_same_bits, layer_of, random_bank, random_call
from triton_device import INTERPRETED, use_triton

use_triton()
pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="tests/gpu has it compiled"),
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.mark.parametrize(("numerics", "returns"), [("a16", "slots"), ("a8", "partials")])
def test_two_cards(rng, numerics, returns):
    layer = layer_of(random_bank(rng, "nvfp4", 4, 128, 128), 2, "triton", numerics=numerics)
    x, ids, weights = random_call(rng, layer, 3)
    ids[1, 0] = -1
    cards = on_cards(layer, Partition.even(4, 2), returns, limits=Limits())
    assert_same_bits(cards.experts(x, ids, weights), layer.experts(x, ids, weights))
    cards.check()
    ids[2] = torch.tensor([4, 3])
    cards.experts(x, ids, weights)
    with pytest.raises(ConfigError, match="an expert id was >= num_experts = 4"):
        cards.check()


def test_token_by_token_is_refused(rng, monkeypatch):
    layer = layer_of(random_bank(rng, "nvfp4", 4, 64, 64), 2, "triton")
    cards = on_cards(layer, Partition.even(4, 2))
    monkeypatch.setenv("EXACTMOE_UNION", "off")
    with pytest.raises(Unsupported, match="EXACTMOE_UNION is off, and several cards run all"):
        cards.experts(*random_call(rng, layer, 2))
