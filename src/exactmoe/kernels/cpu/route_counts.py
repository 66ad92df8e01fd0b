"""What report/route_load.py counts in a trace of routes, in one pass over its ids each."""

import numpy as np

from exactmoe.kernels.cpu.compile import kernel_jit


@kernel_jit
def slots_of_experts(ids, counts):
    """ids int32 [N, K] -> counts int64 [E] grows by the slots of each expert."""
    for token in range(ids.shape[0]):
        for slot in range(ids.shape[1]):
            expert = ids[token, slot]
            if 0 <= expert < len(counts):
                counts[expert] += 1


@kernel_jit
def distinct_in_windows(ids, num_experts, sums):
    """ids int32 [N, K] -> sums int64 [W] grows at width - 1 by the distinct experts of every window
    of `width` consecutive tokens, over all windows.

    An expert counts once in a window: at its last use there. A use at token p, whose next use is at
    token n, is the last one in the windows that end from p to n - 1 and begin at p or before.
    """
    tokens, widest = ids.shape[0], len(sums)
    last = np.full(num_experts, -1, np.int64)
    gaps = np.zeros(widest + 1, np.int64)
    for token in range(tokens):
        for slot in range(ids.shape[1]):
            expert = ids[token, slot]
            if expert < 0 or expert >= num_experts or last[expert] == token:
                continue
            before = last[expert]
            if before >= widest - 1:
                gaps[min(token - before, widest)] += 1
            elif before >= 0:
                _add(sums, before, token, tokens)
            last[expert] = token
    for expert in range(num_experts):
        if last[expert] >= 0:
            _add(sums, last[expert], tokens, tokens)
    for gap in range(1, widest + 1):
        for width in range(1, widest + 1):
            sums[width - 1] += gaps[gap] * min(gap, width)


@kernel_jit
def _add(sums, used, following, tokens):
    """One use, near the first or the last token, where not every window is a whole one."""
    for width in range(1, len(sums) + 1):
        first = max(used, width - 1)
        last = min(following - 1, used + width - 1, tokens - 1)
        sums[width - 1] += max(0, last - first + 1)


@kernel_jit
def slots_of_busiest(ids, owners, num_cards, widths, sums):
    """ids int32 [N, K], owners int64 [E] -> sums int64 [W, 2] grows by the slots of the busiest
    card, and by all slots, of every whole run of `width` tokens, for each of widths [W].
    """
    running = np.zeros((len(widths), num_cards), np.int64)
    one = np.zeros(num_cards, np.int64)
    for token in range(ids.shape[0]):
        one[:] = 0
        for slot in range(ids.shape[1]):
            expert = ids[token, slot]
            if 0 <= expert < len(owners):
                one[owners[expert]] += 1
        for place in range(len(widths)):
            for card in range(num_cards):
                running[place, card] += one[card]
            if (token + 1) % widths[place] == 0:
                most, total = 0, 0
                for card in range(num_cards):
                    most = max(most, running[place, card])
                    total += running[place, card]
                    running[place, card] = 0
                sums[place, 0] += most
                sums[place, 1] += total
