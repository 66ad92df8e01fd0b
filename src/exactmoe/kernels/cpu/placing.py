"""The searches of bank/placing.py: which card takes which expert, from recorded loads."""

import numpy as np

from exactmoe.kernels.cpu.compile import kernel_jit


@kernel_jit
def spread(loads, ranked, rooms, owners):
    """loads f64 [calls, E], ranked [E] (experts, heaviest first), rooms int64 [cards] -> owners
    [E]: each expert to the card that it makes least busy; no card stays empty.
    """
    calls, experts = loads.shape
    cards, busiest = np.zeros((calls, len(rooms))), np.zeros(calls)
    counts = np.zeros(len(rooms), np.int64)
    for place in range(experts):
        expert, idle = ranked[place], 0
        for count in counts:
            idle += count == 0
        taken, least_most, least_total = -1, np.inf, np.inf
        for card in range(len(rooms)):
            if counts[card] >= rooms[card] or (idle >= experts - place and counts[card] > 0):
                continue
            most, total = 0.0, 0.0
            for call in range(calls):
                grown = cards[call, card] + loads[call, expert]
                total += grown
                most += max(grown, busiest[call])
            if most < least_most or (most == least_most and total < least_total):
                taken, least_most, least_total = card, most, total
        for call in range(calls):
            cards[call, taken] += loads[call, expert]
            busiest[call] = max(busiest[call], cards[call, taken])
        counts[taken] += 1
        owners[expert] = taken


@kernel_jit
def exchange(loads, owners, num_cards, sweeps, gain):
    """Exchanges pairs of experts between cards, owners [E] in place, while the sum over calls of
    the busiest card gets less than (1 - gain) of what it was, in at most `sweeps` sweeps.

    Only the calls that use one of the two experts are looked at.
    """
    calls, experts = loads.shape
    starts, users = _users(loads)
    cards, busiest = np.zeros((calls, num_cards)), np.zeros(calls)
    for call in range(calls):
        for expert in range(experts):
            cards[call, owners[expert]] += loads[call, expert]
        busiest[call] = cards[call].max()
    total = busiest.sum()
    for _ in range(sweeps):
        improved = False
        for first in range(experts):
            chosen, least = -1, np.inf
            for second in range(first + 1, experts):
                if owners[second] == owners[first]:
                    continue
                cost = total
                for place in range(starts[first], starts[first + 1]):
                    call = users[place]
                    cost += _after(loads, cards, owners, first, second, call) - busiest[call]
                for place in range(starts[second], starts[second + 1]):
                    call = users[place]
                    if loads[call, first] == 0:
                        cost += _after(loads, cards, owners, first, second, call) - busiest[call]
                if cost < least:
                    chosen, least = second, cost
            if chosen < 0 or least >= total * (1 - gain):
                continue
            _swap(loads, cards, owners, first, chosen)
            for call in range(calls):
                busiest[call] = cards[call].max()
            total, improved = busiest.sum(), True
        if not improved:
            break


@kernel_jit
def _users(loads):
    """The calls that use each expert: those of expert e are users[starts[e] : starts[e + 1]]."""
    calls, experts = loads.shape
    starts = np.zeros(experts + 1, np.int64)
    for expert in range(experts):
        starts[expert + 1] = starts[expert] + np.count_nonzero(loads[:, expert])
    users = np.empty(starts[experts], np.int64)
    for expert in range(experts):
        place = starts[expert]
        for call in range(calls):
            if loads[call, expert] != 0:
                users[place] = call
                place += 1
    return starts, users


@kernel_jit
def _after(loads, cards, owners, first, second, call):
    """Slots of the busiest card of a call if two experts changed places."""
    change = loads[call, second] - loads[call, first]
    most = 0.0
    for card in range(cards.shape[1]):
        slots = cards[call, card]
        if card == owners[first]:
            slots += change
        elif card == owners[second]:
            slots -= change
        most = max(most, slots)
    return most


@kernel_jit
def _swap(loads, cards, owners, first, second):
    for call in range(loads.shape[0]):
        change = loads[call, second] - loads[call, first]
        cards[call, owners[first]] += change
        cards[call, owners[second]] -= change
    owners[first], owners[second] = owners[second], owners[first]
