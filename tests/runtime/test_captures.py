"""Arenas of captured graphs. Without a GPU "a capture" is what workspace.capturing says."""

import gc
import logging

import pytest
import torch

from exactmoe import Limits, MoELayer, ops
from exactmoe.bank import module as bank_module
from exactmoe.errors import Unsupported
from exactmoe.runtime import workspace
from exactmoe.runtime.arena import Arena
from exactmoe.runtime.workspace import Sharing, arena, release_captures
from layers import assert_same_bits, layer_of, random_bank, random_call

CPU = torch.device("cpu")


@pytest.fixture
def capture(monkeypatch):
    """`capture(True)`: from now on a graph is captured."""
    state = [False]
    monkeypatch.setattr(workspace, "capturing", lambda device: state[0])
    monkeypatch.setattr("exactmoe.block.capturing", lambda device: state[0])
    monkeypatch.setattr(bank_module, "capturing", lambda device: state[0])
    release_captures(CPU)

    def become(value: bool) -> None:
        state[0] = value

    yield become
    release_captures(CPU)


def make(rng, rows: int = 4) -> MoELayer:
    return layer_of(random_bank(rng, "nvfp4", 4, 64, 64), 2, "cpu", limits=Limits(max_rows=rows))


def test_a_capture_has_an_arena_of_its_own(capture, rng):
    layer = make(rng)
    call = random_call(rng, layer, 6)
    eager, expected = arena(CPU), layer.experts(*call)
    eager.fill(0xFF)
    capture(True)
    captured = arena(CPU)
    assert captured is not eager and captured.captured
    assert captured.nbytes == eager.nbytes
    assert arena(CPU) is captured  # the graphs of one stream share it
    assert_same_bits(layer.experts(*call), expected)
    views = eager.views(layer.regions(4, ops.DECODED))
    assert (views["x"].view(torch.uint8) == 0xFF).all()
    capture(False)
    assert arena(CPU) is eager


def test_memory_of_a_capture_is_kept_when_it_is_outgrown(capture):
    held = Arena(CPU, captured=True)
    held.reserve(100)
    address, view = held.generation, held.memory
    held.reserve(300)
    assert (held.nbytes, held.held_bytes) == (300, 400)
    assert any(b.data_ptr() == address for b in held._outgrown)
    del view
    plain = Arena(CPU)
    plain.reserve(100)
    plain.reserve(300)
    assert plain.held_bytes == 300


def test_reserve_is_refused_while_a_graph_may_be_alive(capture, rng):
    layer = make(rng)
    call = random_call(rng, layer, 6)
    expected = layer.experts(*call)
    reserved = workspace._of(CPU).reserved
    rows = 2
    while layer.workspace_bytes(rows) <= reserved:
        rows *= 2
    capture(True)
    layer.experts(*call)
    capture(False)
    with pytest.raises(Unsupported, match=f"would grow from {reserved} to .*release_captures"):
        layer.reserve(rows)
    assert layer.limits.max_rows == 4
    layer.reserve(2)  # grows nothing
    assert_same_bits(layer.experts(*call), expected)
    release_captures(CPU)
    layer.reserve(rows)
    assert_same_bits(layer.experts(*call), expected)


def test_layers_are_not_made_in_a_capture(capture, rng):
    layer = make(rng)
    capture(True)
    for make_one in (lambda: make(rng), lambda: layer.reserve(3), lambda: layer.to("cpu")):
        with pytest.raises(Unsupported, match="CUDA graph is (being )?captured"):
            make_one()


def test_weights_are_read_before_a_capture(capture, rng):
    layer = make(rng)
    call = random_call(rng, layer, 3)
    capture(True)
    with pytest.raises(Unsupported, match="gate is prepared for backend 'cpu' for the first time"):
        layer.experts(*call)
    capture(False)
    layer.experts(*call)
    capture(True)
    layer.experts(*call)
    layer.bank.gate_codes.zero_()
    with pytest.raises(Unsupported, match="gate is read for the first time while a CUDA graph is"):
        layer.experts(*call)


def test_the_sharing_is_logged_and_counted(rng, caplog):
    gc.collect()
    before = Sharing.of(CPU)
    with caplog.at_level(logging.INFO, "exactmoe"):
        layer = make(rng, 2 * workspace._of(CPU).reserved // 1000 + 4)
    lines = [m for m in caplog.messages if m.startswith("workspace for calls on cpu: ")]
    assert len(lines) == 1
    after = Sharing.of(CPU)
    assert lines[0].endswith(str(after))
    assert after.layers == before.layers + 1
    assert after.private_bytes == before.private_bytes + layer.workspace_bytes()
    assert after.nbytes >= layer.workspace_bytes()
    del layer
    gc.collect()
    assert Sharing.of(CPU).layers == before.layers


def test_no_rows_take_the_space_of_one(rng):
    layer = make(rng)
    assert layer.workspace_bytes(0) == layer.workspace_bytes(1)
    assert layer.workspace_bytes() == layer.workspace_bytes(4)
