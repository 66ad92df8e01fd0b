"""Partitions by free memory, and by recorded route loads."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exactmoe.bank import Partition, busiest, by_load, fit
from exactmoe.errors import ConfigError

GB = 10**9


def fitted(num_experts, expert_bytes, free, dense=None, workspace=None, kv_reserve=None):
    zeros = [0] * len(free)
    return fit(
        num_experts,
        expert_bytes,
        free,
        dense_bytes=dense or zeros,
        workspace_bytes=workspace or zeros,
        kv_reserve_bytes=kv_reserve or zeros,
    )


def test_fit_leaves_room_for_dense_parts_workspace_and_kv_cache():
    """Two cards of 96 GB, 288 experts of 600 MB; the first card's dense parts leave it less."""
    found = fitted(
        288, 600 * 10**6, [96 * GB, 96 * GB], [9 * GB, GB], [10**8, 10**8], [3 * GB, 3 * GB]
    )
    # 83.9 GB hold 139 experts, 91.9 GB hold 153: 288 in that proportion are 137.1 and 150.9.
    assert found.counts == (137, 151)
    assert found.rule == "fit, with 3000000000, 3000000000 bytes kept for the KV cache"
    assert fitted(288, 600 * 10**6, [96 * GB, 96 * GB]).counts == (144, 144)


def test_fit_to_the_last_expert():
    assert fitted(5, 10, [29, 39]).counts == (2, 3)
    assert fitted(3, 10, [10, 1000]).counts == (1, 2)  # a card keeps at least one


@given(st.lists(st.integers(1, 60), min_size=1, max_size=6), st.integers(1, 100))
def test_fit_never_passes_a_room(rooms, num_experts):
    if not len(rooms) <= num_experts <= sum(rooms):
        with pytest.raises(ConfigError):
            fitted(num_experts, 7, [7 * room + 6 for room in rooms])
        return
    found = fitted(num_experts, 7, [7 * room + 6 for room in rooms])
    assert found.num_experts == num_experts
    assert all(1 <= count <= room for count, room in zip(found.counts, rooms, strict=True))


FIT_REFUSED = [
    ({"free": [50, 50]}, "the cards have room for [5, 5] experts of 10 bytes, together 10"),
    (
        {"free": [500, 50], "dense": [0, 20], "workspace": [0, 11], "kv_reserve": [0, 12]},
        "card 1 has 7 bytes for experts (free 50 - dense 20 - workspace 11 - KV reserve 12)",
    ),
    ({"free": [500, 500], "dense": [1]}, "dense_bytes is [1]; allowed: 2 integers from 0"),
    ({"free": [500, -1]}, "free_bytes is [500, -1]"),
    ({"free": []}, "free_bytes is []; allowed: one or more integers"),
    ({"free": [500.0, 500]}, "free_bytes is [500.0, 500]; allowed: 2 integers"),
    ({"free": [float("nan")]}, "free_bytes is [nan]; allowed: 1 integers"),
]


@pytest.mark.parametrize(("settings", "message"), FIT_REFUSED)
def test_fit_refused(settings, message):
    with pytest.raises(ConfigError) as caught:
        fitted(11, 10, **settings)
    assert message in str(caught.value)


def test_busiest():
    loads = torch.tensor([[4, 0, 1, 1], [0, 2, 2, 2]])
    assert busiest(Partition((0, 0, 1, 1)), loads) == (4 + 4) / 2
    assert busiest(Partition((0, 1, 1, 1)), loads) == (4 + 6) / 2


def test_experts_that_are_used_together_are_parted():
    """Even by total load, the pairs that every call uses would be on one card."""
    loads = torch.tensor([[3.0, 3.0, 0.0, 0.0], [0.0, 0.0, 3.0, 3.0]])
    assert busiest(Partition.even(4, 2), loads) == 6.0
    found = by_load(loads, 2)
    assert busiest(found, loads) == 3.0
    assert found.counts == (2, 2)
    assert found.rule == "by route loads of 2 calls"


def test_by_load_is_near_the_best_of_all(rng):
    loads = torch.randint(0, 9, (5, 8), generator=rng)
    halves = [
        Partition(tuple(int(e in chosen) for e in range(8)))
        for chosen in itertools.combinations(range(8), 4)
    ]
    best = min(busiest(half, loads) for half in halves)
    found = by_load(loads, 2)
    assert found == by_load(loads.clone(), 2)
    assert busiest(found, loads) <= best * 1.05
    assert busiest(found, loads) < busiest(Partition.even(8, 2), loads)


def test_experts_are_exchanged_after_the_heaviest_first():
    """Heaviest first gives {3, 2, 2} and {3, 2}; an exchange makes them {2, 2, 2} and {3, 3}."""
    assert busiest(by_load(torch.tensor([3, 3, 2, 2, 2]), 2), torch.tensor([3, 3, 2, 2, 2])) == 6.0


def test_by_load_keeps_to_the_rooms(rng):
    loads = torch.rand(3, 20, generator=rng)
    assert by_load(loads, 3).counts == (7, 7, 6)
    counts = by_load(loads[0], 3, most=[1, 4, 18]).counts
    assert counts[0] == 1
    assert counts[1] <= 4
    assert min(by_load(torch.zeros(4), 4).counts) == 1


LOADS_REFUSED = [
    (lambda: by_load(torch.ones(2, 3, 4), 2), "loads are (2, 3, 4); allowed: [calls, E]"),
    (lambda: by_load(torch.tensor([1.0, -1.0]), 2), "allowed: [calls, E], finite, from 0"),
    (lambda: by_load(torch.tensor([1.0, float("nan")]), 2), "finite"),
    (lambda: by_load(torch.ones(4), 5), "num_cards is 5 for 4 experts"),
    (lambda: by_load(torch.ones(4), 2, most=[1, 2]), "most is [1, 2] for 4 experts on 2 cards"),
    (lambda: by_load(torch.ones(4), 2, most=[4]), "one number from 1 a card"),
    (lambda: busiest(Partition.even(4, 2), torch.ones(5)), "loads are (5,); allowed: [calls, 4]"),
]


@pytest.mark.parametrize(("make", "message"), LOADS_REFUSED)
def test_loads_refused(make, message):
    with pytest.raises(ConfigError) as caught:
        make()
    assert message in str(caught.value)
