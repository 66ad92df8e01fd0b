"""What orders the cards: marks alone. Lanes here do everything as late as these allow."""

import pytest
import torch

from card_layers import on_cards, ways
from deferred_lanes import deferred_lanes
from exactmoe import Limits
from exactmoe.bank import Partition
from exactmoe.errors import Unsupported
from exactmoe.runtime import arena as arenas
from exactmoe.runtime import workspace
from exactmoe.runtime.arena import Arena
from layers import CLASSES, assert_same_bits
from small_layers import small_layer

PARTITIONS = (Partition.even(8, 2), Partition.even(8, 4), Partition.even(8, 3))
CPU = torch.device("cpu")


@pytest.fixture
def own_arena(monkeypatch):
    """An arena without lanes of other tests, and none of ours is left in that of the process."""
    monkeypatch.setattr(workspace, "_devices", {})


def deferred(monkeypatch, seed=0, eager=0.0):
    make, world = deferred_lanes(seed, eager)
    monkeypatch.setattr(arenas, "lanes_of", make)
    return world


@pytest.mark.parametrize("numerics", CLASSES)
@pytest.mark.parametrize("serial", [False, True])
@pytest.mark.parametrize("eager", [0.0, 0.3, 0.9])
def test_bits_as_late_as_can_be(rng, monkeypatch, own_arena, numerics, serial, eager):
    layer = small_layer(rng, numerics=numerics)
    calls = [torch.randn(n, 128, generator=rng).bfloat16() for n in (7, 1, 20, 7)]
    calls = [x[:, : layer.config.hidden_size].contiguous() for x in calls]
    expected = [layer(x) for x in calls]
    deferred(monkeypatch, 3, eager)
    for partition in PARTITIONS:
        for returns in ways(partition):
            cards = on_cards(layer, partition, returns, serial, limits=Limits(max_rows=8))
            workspace._devices[CPU].arenas.clear()  # lanes for as many cards as this layer has
            for x, wanted in zip(calls, expected, strict=True):
                assert_same_bits(cards(x), wanted, f"{partition.rule} {returns}")


def test_the_host_waits_for_no_lane(rng, monkeypatch, own_arena):
    """All is queued before anything is done."""
    layer = small_layer(rng)
    world = deferred(monkeypatch)
    cards = on_cards(layer, Partition.even(8, 2), limits=Limits(max_rows=8))
    seen = []

    def counting(card, length, finish=world.finish):
        seen.append([lane.done for lane in world.lanes])
        finish(card, length)

    monkeypatch.setattr(world, "finish", counting)
    cards(torch.zeros(3, layer.config.hidden_size).bfloat16())
    assert seen[0] == [0, 0]


def test_both_cards_have_work_before_either_is_waited_for(rng, monkeypatch, own_arena):
    """The owner's gate_up comes before its first wait for a peer; with `serial` the peer's comes
    after the owner's down.
    """
    layer = small_layer(rng)
    for serial, wanted in ((False, 2), (True, 2)):
        world = deferred(monkeypatch)
        workspace._devices.clear()
        cards = on_cards(layer, Partition.even(8, 2), "slots", serial, limits=Limits(max_rows=8))
        cards(torch.zeros(3, layer.config.hidden_size).bfloat16())
        owner, peer = world.lanes
        kinds = [kind for kind, _ in owner.queue]
        assert kinds.index("wait") == 1 + wanted  # send, begin, end: then the return
        waits = [what for kind, what in peer.queue if kind == "wait"]
        assert waits[0] == (0, 1)  # the message
        assert (len(waits) > 1) == serial
        if serial:
            assert waits[1] == (0, 3)  # the owner's down


def test_an_error_drains_every_lane(rng, monkeypatch, own_arena):
    layer = small_layer(rng)
    world = deferred(monkeypatch)
    cards = on_cards(layer, Partition.even(8, 2), "slots", limits=Limits(max_rows=8))
    x = torch.randn(3, layer.config.hidden_size, generator=rng).bfloat16()
    expected = layer(x)
    assert_same_bits(cards(x), expected)
    before = world.lanes[1].mark

    def failing():
        world.lanes[1].mark = before
        raise RuntimeError("planted")

    world.lanes[1].mark = failing  # the event after the peer's copy: its work is queued
    with pytest.raises(RuntimeError, match="planted"):
        cards(x)
    assert [lane.drained for lane in world.lanes] == [1, 1]
    assert all(lane.done == len(lane.queue) for lane in world.lanes)
    with pytest.raises(Unsupported, match=r"an earlier call on these cards failed"):
        cards(x)
    cards.reset()
    assert_same_bits(cards(x), expected)


def test_an_arena_keeps_lanes_by_device():
    held = Arena(CPU)
    assert held.lanes((CPU, CPU)) is held.lanes((CPU, CPU))
    assert held.lanes((CPU, CPU)) is not held.lanes((CPU, CPU, CPU))
