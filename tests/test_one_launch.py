"""How many launches a call's routed experts take, on a path whose gate_up_down computes both: that
path is the CPU's here.
"""

from dataclasses import replace

import pytest
import torch

from exactmoe import block, ops
from exactmoe.formats.rows import Rows
from exactmoe.ops.cpu_path import CpuPath
from exactmoe.report.profile import profile
from layers import assert_same_bits
from small_layers import small_layer

STORAGE = replace(ops.DECODED, packed=True, one_launch=True, reads_given=True)
WAYS = {
    "few slots": ({}, ["gate_up_down"]),
    "one": ({"EXACTMOE_EXPERTS": "one"}, ["gate_up_down"]),
    "two": ({"EXACTMOE_EXPERTS": "two"}, ["gate_up", "down"]),
    "a token at a time": ({"EXACTMOE_UNION": "off"}, ["gate_up_down"] * 3),
}


class Both(CpuPath):
    """Keeps the names of its launches. The CPU's loops want x in float32, and no more rows of h
    than slots.
    """

    storage = STORAGE
    launched: list[str] = []

    def gate_up(self, rows, weights, routes, routing, limit, h):
        self.launched.append("gate_up")
        self._first(rows, weights, routes, limit, h)

    def down(self, h, *given):
        self.launched.append("down")
        CpuPath.down(h, *given)

    def gate_up_down(self, rows, weights, routes, settings, h, slots):
        self.launched.append("gate_up_down")
        limit, numerics, routing = settings
        assert routing is None  # class a16
        self._first(rows, weights[:2], routes, limit, h.values)
        CpuPath.down(h, weights[2], routes, numerics, slots)

    def _first(self, rows, weights, routes, limit, h):
        wide, count = Rows(rows.values.float(), None), routes.slots.shape[0]
        CpuPath.gate_up(wide, weights, routes, None, limit, h[:count])


@pytest.fixture
def layer(rng):
    return small_layer(rng, "bare")


@pytest.fixture
def call(rng, layer):
    """x, ids and weights of three tokens."""
    x = torch.randn(3, layer.config.hidden_size, generator=rng).bfloat16()
    ids = torch.tensor([[0, 3], [3, 5], [0, 7]], dtype=torch.int32)
    return x, ids, torch.rand(3, 2, generator=rng)


def use_both(monkeypatch) -> list[str]:
    path = Both()
    monkeypatch.setattr(Both, "launched", [])
    monkeypatch.setattr(ops, "path", lambda name: path)
    monkeypatch.setattr(block, "_storages", lambda device, units: (STORAGE,))
    return path.launched


@pytest.mark.parametrize("way", WAYS)
def test_launches_of_a_call(layer, call, monkeypatch, way):
    switches, names = WAYS[way]
    expected = layer.experts(*call)
    for name, value in switches.items():
        monkeypatch.setenv(name, value)
    launched = use_both(monkeypatch)
    layer.reserve(16)
    assert_same_bits(layer.experts(*call), expected)
    assert launched == names


def test_many_slots_take_two_launches(rng, layer, monkeypatch):
    x = torch.randn(33, layer.config.hidden_size, generator=rng).bfloat16()
    ids = torch.tensor([[0, 3]] * 33, dtype=torch.int32)
    weights = torch.rand(33, 2, generator=rng)
    expected = {
        tokens: layer.experts(x[:tokens], ids[:tokens], weights[:tokens]) for tokens in (32, 33)
    }
    launched = use_both(monkeypatch)
    layer.reserve(33)
    for tokens, names in ((32, ["gate_up_down"]), (33, ["gate_up", "down"])):
        launched.clear()
        found = layer.experts(x[:tokens], ids[:tokens], weights[:tokens])
        assert_same_bits(found, expected[tokens])
        assert launched == names


def test_a_profile_splits_the_launch(layer, call, monkeypatch):
    """So that gate_up and down have their own times; without it they are one again."""
    expected = layer.experts(*call)
    launched = use_both(monkeypatch)
    layer.reserve(16)
    with profile(layer) as found:
        assert_same_bits(layer.experts(*call), expected)
    assert launched == ["gate_up", "down"]
    (row,) = found.rows()
    assert {"gate_up", "down"} <= set(row.us)
    layer.experts(*call)
    assert launched[2:] == ["gate_up_down"]


def test_each_expert_by_itself(layer, call, monkeypatch):
    """EXACTMOE_HOST_LOOP: its table leaves an expert where all slots put it in packed rows."""
    expected = layer.experts(*call)
    monkeypatch.setenv("EXACTMOE_HOST_LOOP", "on")
    launched = use_both(monkeypatch)
    layer.reserve(16)
    assert_same_bits(layer.experts(*call), expected)
    assert launched == ["gate_up_down"] * 4
