"""Names of devices: resolved once, and refused when there is no such card."""

import pytest
import torch

from exactmoe.errors import ConfigError, Unsupported
from exactmoe.runtime import devices


@pytest.fixture
def two_cards(monkeypatch):
    current = [0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    return current


def test_a_name_without_a_number_is_the_current_card(two_cards):
    two_cards[0] = 1
    assert devices.resolve("cuda") == torch.device("cuda", 1)
    assert devices.resolve("cuda:0") == torch.device("cuda", 0)
    assert devices.resolve("cpu") == torch.device("cpu")


def test_a_card_that_is_not_there(two_cards, monkeypatch):
    with pytest.raises(ConfigError, match="card is 'cuda:2'; allowed: cuda:0 to cuda:1"):
        devices.resolve("cuda:2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Unsupported, match="card is 'cuda'; torch .* sees no GPU; allowed: cpu"):
        devices.resolve("cuda")


def test_nothing_is_captured_where_no_gpu_was_used():
    assert not devices.capturing(torch.device("cpu"))
    assert torch.cuda.is_initialized() or not devices.capturing(torch.device("cuda", 0))
