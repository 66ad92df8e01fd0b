"""gate_up and down of sm_90, in one launch and in two, run by the emulator: their text, not their
machine code.

Values: near the reference. Bytes: equal over tiles, grids, orders of events and ring sizes. Races:
none in any of the orders, and planted ones are found.
"""

from dataclasses import replace
from itertools import product

import pytest
import torch

import emulate
from emulate import EmulatorError
from emulated_experts import TOP_K, Problem, Run, expected, slots_of
from exactmoe.kernels.cuda.source import TOKENS

pytestmark = pytest.mark.skipif(emulate.missing() is not None, reason=str(emulate.missing()))
# The emulator adds along k in float; down's rounding to bf16 hides most of it.
CLOSE = 2.0**-12
# (tile, tokens, blocks, seed, stages, way): an expert has more rows than the tile, and fewer.
CASES = {
    Problem("mxfp4"): [
        *(Run(128, 130), Run(40, 24, 1, 1, 3, "two"), Run(8, 12, 7, 2, 3)),
        Run(8, 12, 3, 13, 4, "each"),
    ],
    Problem("nvfp4"): [Run(64, 72, 3, 3, 3), Run(16, 24, 1, 4, 3, "two")],
    Problem("nvfp4-divide", experts=100, slot="f32"): [Run(8, 24, 7, 4)],
    Problem("nvfp4 nvfp4-divide nvfp4"): [Run(8, 12, 2, 16, 3), Run(16, 12, 3, 17, 3, "two")],
    Problem("nvfp4 nvfp4-divide nvfp4", "a8"): [Run(8, 12, 2, 18, 3)],
    Problem("mxfp4", hidden=384): [Run(16, 20, 2, 14), Run(8, 12, 3, 15, 3, "two")],
    Problem("mxfp4", "a8", "fp8"): [Run(112, 114, 3, 5), Run(16, 24, 7, 6, 3, "two")],
    Problem("nvfp4", "a8", "fp8", 384): [Run(40, 44, 3, 7, 3), Run(8, 12, 1, 8, 3, "two")],
    Problem("mxfp4", "a8", "both"): [
        *(Run(64, 40, 3, 9, 3), Run(16, 12, 3, 10, 3, "two")),
    ],
    Problem("nvfp4", "a8", "bf16"): [Run(40, 44, 3, 11, 3, "two"), Run(8, 8, 7, 12, 3)],
    Problem("nvfp4", "a8", "bf16", largest=True): [
        *(Run(40, 12, 3, 13, 3, "two"), Run(8, 8, 1, 14, 3)),
    ],
}


def label(problem: Problem) -> str:
    of = f"{problem.format} {problem.activation} {problem.units}"
    return f"{of} {problem.hidden} {problem.experts}" + " largest" * problem.largest


def assert_same_bytes_near_the_reference(problem: Problem, runs: list[Run]) -> None:
    first, true = None, expected(problem)
    for run in runs:
        found, rows = slots_of(problem, run), run.tokens * TOP_K
        error = (found.double() - true[:rows]).norm() / true[:rows].norm()
        assert error < CLOSE, f"{run}: {float(error)}"
        first = found if first is None else first
        assert torch.equal(found.view(torch.uint8), first[:rows].view(torch.uint8)), run


@pytest.mark.parametrize("problem", CASES, ids=label)
def test_tiles_grids_and_orders_give_the_same_bytes_near_the_reference(problem):
    assert_same_bytes_near_the_reference(problem, CASES[problem])


@pytest.mark.long
@pytest.mark.parametrize("problem", CASES, ids=label)
def test_every_tile_in_many_orders(problem):
    widest = 112 if problem.units == "fp8" else 128 if problem.activation == "a16" else 64
    tiles = [tile for tile in TOKENS[problem.activation] if tile <= widest]
    runs = [Run(widest, 136, 2)]
    for tile, (seed, blocks) in product(tiles, enumerate((1, 3, 7))):
        runs.append(Run(tile, tile // 2 + 6 * seed + 4, blocks, 20 + seed, 3 * (seed % 2)))
    assert_same_bytes_near_the_reference(problem, runs)


# What is replaced, by what, and what the emulator says. Each is one line that somebody could
# forget.
FILL = (
    "barrier_wait(ring.empty + 8 * place.stage, place.parity ^ 1);\n                if (lane == 0)"
)
STAGE = "if (OVERLAP && begin == 0 && gives_back) barrier_arrive(before);"
TOLD = "        barrier_wait(ring.item_empty + 8 * turn.stage, turn.parity ^ 1);\n"
WRITTEN = "        told = item;\n        barrier_arrive(full);\n"
EARLY = "        barrier_arrive(full);\n        told = item;\n"
FACTOR = "told.second_factor = second;\n        barrier_arrive(full);\n"
FACTORS = (
    "        barrier_wait(ring.factors_full + 8 * told.stage, told.parity);\n        float sums"
)
FACTOR = "told.second_factor = second;\n        barrier_arrive(full);\n"
UNITS = "        if (MIXED && item.phase != 0)\n"
REVERSED = "index = given.phases == 3 ? items - 1 - index : index;\n        bool down ="
ADDED = "add_release(given.counters + NUM_QUEUES + expert, 1)"
A16, A8 = Problem("mxfp4"), Problem("mxfp4", "a8", "fp8")
MIXED = Problem("mxfp4", "a8", "both")
NARROW, WIDE, DEEP = Run(8, 12, 1, 0, 3), Run(40, 24, 1, 0, 3, "two"), Run(8, 12, 1)
SEVERAL, ALONE = Run(8, 12, 3, 0, 3), Run(8, 12, 3, 0, 3, together=1)
FAULTS = {
    "a stage is filled before it was given back": (
        A16,
        WIDE,
        FILL,
        "if (lane == 0)",
        "race on|has them all",
    ),
    "a stage is given back too early": (
        *(A16, NARROW, STAGE, STAGE.replace("before", "done")),
        "race on .* behind the read by wgmma|deadlock",
    ),
    "a stage is given back while lanes read scales": (
        *(A8, WIDE, "            __syncwarp();  // every lane", "            // every lane"),
        "race on",
    ),
    "rows are copied without a proxy fence": (
        *(A16, NARROW, "        proxy_fence();\n", "", "a proxy fence is missing"),
    ),
    "lanes do not wait for each other's copies": (
        *(A16, NARROW, "        proxy_fence();\n        __syncwarp();\n", "proxy_fence();\n"),
        "behind the write by asynchronous copy",
    ),
    "sums are read while the matrix units work": (
        *(A16, WIDE, "else wgmma_wait<0>();", "else wgmma_wait<1>();"),
        "race on|sum .* was written|did not wait for",
    ),
    "more bytes are expected than come": (
        *(A16, NARROW, "barrier_arrive_expect(full, WEIGHT_BYTES)"),
        "barrier_arrive_expect(full, 16 + WEIGHT_BYTES)",
        r"deadlock(?s:.*)barrier_wait of barrier \d+, parity 0 at multiply.cuh:\d+",
    ),
    "an item is told over one that others read": (A16, DEEP, TOLD, "", "race on .* __shared__"),
    "an item is told before it is written": (A16, DEEP, WRITTEN, EARLY, "race on .* __shared__"),
    "factors are told before they are written": (
        *(A8, DEEP, FACTOR, "barrier_arrive(full);\n        told.second_factor = second;\n"),
        "race on .* __shared__",
    ),
    "factors are read before they are told": (
        *(A16, DEEP, FACTORS, "        float sums", "race on .* __shared__"),
    ),
    "units of an item are read before they are told": (
        *(MIXED, DEEP, UNITS, "        if (false)\n", "race on .* __shared__"),
    ),
    "factors are awaited with the wrong parity": (
        *(A8, DEEP, FACTORS, FACTORS.replace("told.parity", "told.parity ^ 1")),
        "race on .* __shared__|deadlock",
    ),
    "h is read before it is written": (
        *(A16, SEVERAL, "    while (load_acquire(ready) < written) {}\n", ""),
        "race on .* of h: the read by bulk copy",
    ),
    "h is counted, and not released": (
        *(A8, SEVERAL, ADDED, "atomicAdd(given.counters + NUM_QUEUES + expert, 1u)"),
        "race on .* of h: the read by bulk copy",
    ),
    "h goes through no proxy fence, of who writes nor of who reads": (
        *(A16, SEVERAL, "proxy_fence_global();", ";", "h: .* a proxy fence is missing"),
    ),
    "one warp of h is not waited for": (
        *(A16, SEVERAL, "* WARPS;\n", "* WARPS - 1;\n", "race on .* of h|deadlock"),
    ),
    "down is taken before gate_up, and not all blocks are there": (
        *(A16, ALONE, "bool down =", REVERSED),
        r"deadlock(?s:.*)multiply.cuh:\d+",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_emulator_finds_a_planted_fault(name):
    problem, run, old, new, words = FAULTS[name]
    places = []

    def planted(text: str) -> str:
        places.append(text.count(old))
        return text.replace(old, new)

    with pytest.raises(EmulatorError, match=words):
        slots_of(problem, run, planted)
    # Where the fault was found; a fence is on both sides.
    assert places[-1] == (2 if "nor" in name else 1)


@pytest.mark.parametrize("way", ["one", "two"])
def test_counters_that_are_not_cleared_are_seen(way):
    """emulated_launches.py looks at them behind each launch."""

    def planted(text: str) -> str:
        return text.replace("index == items + gridDim.x - 1", "index == items + gridDim.x")

    with pytest.raises(AssertionError, match=r"not zeros: \[\[\d\]\]"):
        slots_of(A16, replace(SEVERAL, way=way), planted)


@pytest.mark.parametrize("together", [1, 2])
def test_blocks_need_not_all_be_there(together):
    """Whoever waits, waits for a block that runs: other kernels may have most of the card."""
    run = Run(8, 12, 7, 1, 3, together=together)
    found = slots_of(A16, run)
    assert torch.equal(found.view(torch.uint8), slots_of(A16, SEVERAL).view(torch.uint8))


@pytest.mark.parametrize("problem", [A16, A8], ids=label)
def test_more_blocks_than_items(problem):
    """Two tokens have at most 4 tiles, and here 3."""
    found = slots_of(problem, Run(8, 2, 99, 3, 3))
    rows = slots_of(problem, Run(8, 12, 3, 0, 3))[: 2 * TOP_K]
    assert torch.equal(found.view(torch.uint8), rows.view(torch.uint8))


@pytest.mark.parametrize("way", ["one", "two"])
def test_without_a_slot_nothing_is_written(way):
    for problem in (A16, A8):
        found = slots_of(problem, Run(8, 12, 3, 4, 3, way, absent=True))
        assert torch.equal(
            found.view(torch.uint8), torch.full_like(found, 0).view(torch.uint8) | 255
        )
