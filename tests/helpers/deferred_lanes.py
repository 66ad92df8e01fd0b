"""Lanes that put off all work, as streams may: only what a mark asks for is done in time.

Work runs when the owner's lane is behind it and has to be read, and then the lanes run as unlucky
as the marks allow: each step is done as late as it can be, in an order of lanes that a seed draws.
A wait that is missing in the dispatch makes wrong bits here, as it may on GPUs.
"""

import random
from collections.abc import Callable
from typing import Any

import torch

from exactmoe.runtime.lanes import OWNER, Lane, Lanes


class Deferred:
    """A lane; its queue holds work, marks and waits."""

    def __init__(self, device: torch.device, card: int, world: "World") -> None:
        self.device, self.card, self.world = device, card, world
        self.queue: list[tuple[str, Any]] = []
        self.done = 0
        self.drained = 0

    def begin(self) -> None:
        pass

    def put(self, work: Callable[[], None]) -> None:
        self.queue.append(("work", work))

    def send(self, work: Callable[[], None], target: Lane) -> None:
        self.put(work)

    def mark(self) -> tuple[int, int]:
        return (self.card, len(self.queue))

    def wait(self, mark: tuple[int, int]) -> None:
        self.queue.append(("wait", mark))

    def end(self) -> None:
        if self.card == OWNER:  # the caller reads what its own stream has done
            self.world.finish(OWNER, len(self.queue))

    def drain(self) -> None:
        self.drained += 1
        self.world.finish(self.card, len(self.queue))


class World:
    """All lanes, and the order that they run in."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lanes: list[Deferred] = []
        self.eager = 0.0  # how often another lane does a step that nobody waits for yet

    def step(self, lane: Deferred) -> None:
        kind, what = lane.queue[lane.done]
        if kind == "wait":
            self.finish(*what)
        lane.done += 1
        if kind == "work":
            what()

    def finish(self, card: int, length: int) -> None:
        """Does a lane's first `length` entries, and what they wait for."""
        lane = self.lanes[card]
        while lane.done < length:
            others = [o for o in self.lanes if o is not lane and o.done < len(o.queue)]
            if others and self.random.random() < self.eager:
                other = self.random.choice(others)
                if self.ready(other):
                    self.step(other)
                    continue
            self.step(lane)

    def ready(self, lane: Deferred) -> bool:
        """Whether the next entry can be done without doing more of another lane."""
        kind, what = lane.queue[lane.done]
        return kind == "work" or self.lanes[what[0]].done >= what[1]


def deferred_lanes(seed: int, eager: float) -> tuple[Callable[..., Lanes], World]:
    """In place of runtime.lanes.lanes_of: for the cards of one layer."""
    world = World(seed)
    world.eager = eager

    def make(devices: Any) -> Lanes:
        world.lanes = [Deferred(device, card, world) for card, device in enumerate(devices)]
        return Lanes(world.lanes)

    return make, world
