"""Names of devices: resolved once, and refused when there is no such card."""

import sys
import types

import pytest
import torch

from exactmoe.errors import ConfigError, Unsupported
from exactmoe.runtime import devices
from exactmoe.runtime.devices import allocating_beside_a_capture


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


class FalseDriver:
    """cuda.bindings.driver: modes as numbers, and what was asked for."""

    class CUresult:
        CUDA_SUCCESS = 0

    class CUstreamCaptureMode:
        CU_STREAM_CAPTURE_MODE_RELAXED = 2

    def __init__(self, status=0):
        self.status, self.mode, self.seen = status, 0, []

    def cuThreadExchangeStreamCaptureMode(self, mode):
        before, self.mode = self.mode, mode
        self.seen.append(mode)
        return self.status, before


@pytest.fixture
def driver(monkeypatch):
    def use(found):
        package = types.ModuleType("cuda.bindings")
        if found is not None:
            package.driver = found
        monkeypatch.setitem(sys.modules, "cuda.bindings", package)
        monkeypatch.delitem(sys.modules, "cuda.bindings.driver", raising=False)
        return found

    return use


def test_memory_beside_a_capture(driver):
    """The mode is put back, after an error too."""
    found = driver(FalseDriver())
    with allocating_beside_a_capture():
        assert found.mode == 2
    with pytest.raises(ZeroDivisionError), allocating_beside_a_capture():
        _ = 1 / 0
    assert found.mode == 0 and found.seen == [2, 0, 2, 0]


def test_memory_beside_a_capture_without_bindings(driver):
    driver(None)
    asked = allocating_beside_a_capture()
    with pytest.raises(Unsupported, match="a graph over two GPUs needs cuda-bindings"), asked:
        pass
