"""gate_up and down of sm_90, run by the emulator: their text, not their machine code.

Values: near the reference. Bytes: equal over tiles, grids, orders of events and ring sizes. Races:
none in any of the orders, and planted ones are found.
"""

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
# (tile, tokens, blocks, seed, stages): an expert has more rows than the tile, and fewer.
CASES = {
    Problem("mxfp4"): [Run(128, 136), Run(40, 24, 1, 1, 2), Run(8, 12, 7, 2, 3)],
    Problem("nvfp4"): [Run(64, 72, 3, 3, 2), Run(16, 24, 1, 4, 3)],
    Problem("nvfp4-divide", experts=100, slot="f32"): [Run(8, 24, 7, 4)],
    Problem("mxfp4", "a8", "fp8"): [Run(112, 120, 3, 5), Run(16, 24, 7, 6, 3)],
    Problem("nvfp4", "a8", "fp8"): [Run(40, 44, 3, 7, 2), Run(8, 12, 1, 8, 3)],
    Problem("mxfp4", "a8", "both"): [Run(64, 40, 3, 9, 2), Run(16, 12, 3, 10, 2)],
    Problem("nvfp4", "a8", "bf16"): [Run(40, 44, 3, 11, 2), Run(8, 8, 7, 12, 2)],
    Problem("nvfp4", "a8", "bf16", largest=True): [Run(40, 12, 3, 13, 2), Run(8, 8, 1, 14, 2)],
}


def label(problem: Problem) -> str:
    kind = " largest" * problem.largest
    return f"{problem.format} {problem.activation} {problem.units} {problem.experts}{kind}"


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


# What is replaced in gate_up, by what, and what the emulator says. Each is one line that somebody
# could forget.
FILL = "barrier_wait(ring.empty + 8 * place.stage, place.parity ^ 1);\n                fill"
STAGE = "u32 done = ring.empty + 8 * (OVERLAP ? place.last() : place.stage);"
A16, A8 = Problem("mxfp4"), Problem("mxfp4", "a8", "fp8")
NARROW, WIDE = Run(8, 12, 1, 0, 3), Run(40, 24, 1, 0, 2)
FAULTS = {
    "a stage is filled before it was given back": (A16, WIDE, FILL, "fill", "race on"),
    "a stage is given back too early": (
        *(A16, NARROW, STAGE, "u32 done = ring.empty + 8 * place.stage;"),
        "race on .* behind the read by wgmma",
    ),
    "a stage is given back while lanes read scales": (
        *(A8, WIDE, "            __syncwarp();  // every lane", "            // every lane"),
        "race on",
    ),
    "rows are copied without a proxy fence": (
        *(A16, NARROW, "            proxy_fence();\n", "", "a proxy fence is missing"),
    ),
    "lanes do not wait for each other's copies": (
        *(A16, NARROW, "            __syncwarp();\n", "", "behind the write by asynchronous copy"),
    ),
    "sums are read while the matrix units work": (
        *(A16, WIDE, "else wgmma_wait<0>();", "else wgmma_wait<1>();"),
        "race on|sum .* was written|did not wait for",
    ),
    "more bytes are expected than come": (
        *(A16, NARROW, "expected = WEIGHT_BYTES +", "expected = 16 + WEIGHT_BYTES +"),
        r"deadlock(?s:.*)barrier_wait of barrier \d+, parity 0 at multiply.cuh:\d+",
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
    assert places[-1] == 1  # where the fault was found
