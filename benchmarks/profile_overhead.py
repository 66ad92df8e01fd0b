"""What `exactmoe.profile` costs: one MoE block with it off, off again, and on.

    python benchmarks/profile_overhead.py                        # a small block on a CPU
    python benchmarks/profile_overhead.py --device cuda          # GLM's block on a card

Off is measured twice, in turn with on: the difference of the two is what this machine cannot tell
apart. Times are medians of runs of back-to-back calls: on a card by the clock, the card waited for
at the end of a run, and of replays of a captured call as well; on a CPU the CPU time of the
process, so that other programs do not count (one thread: EXACTMOE_THREADS=1). Bits are compared.
"""

import argparse
import statistics
import time
import timeit
from collections.abc import Callable
from contextlib import nullcontext

import torch

import exactmoe
from exactmoe import MoELayer
from exactmoe.bench import parse_shape
from exactmoe.bench.problem import draw_dense, draw_problem, draw_router
from exactmoe.proof import fingerprint

BACK_TO_BACK = 20
CHECKS = 1_000_000


def build(shape_name: str, device: torch.device) -> tuple[MoELayer, int]:
    """A random block of a shape, and its hidden size."""
    shape = parse_shape(shape_name)
    generator = torch.Generator(device).manual_seed(0)
    bank = draw_problem(shape, shape.format, device, generator).bank()
    router = draw_router(shape, device, generator)
    shared = draw_dense(shape, shape.shared_size, device, generator, "auto")
    layer = MoELayer(shape.config("a16"), bank, router=router, shared=shared)
    return layer, shape.hidden_size


def wait(device: torch.device) -> None:
    """For all that is queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def run(call: Callable[[], object], device: torch.device) -> float:
    """Microseconds of a call, of a run of them."""
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    wait(device)
    start = clock()
    for _ in range(BACK_TO_BACK):
        call()
    wait(device)
    return 1e6 * (clock() - start) / BACK_TO_BACK


def measured(layer: MoELayer, call: Callable[[], object], rounds: int) -> tuple[float, ...]:
    """Medians of off, off again, on; they take turns."""
    times: tuple[list[float], ...] = ([], [], [])
    for number in range(rounds):
        for place in (0, 1, 2) if number % 2 else (2, 1, 0):
            with exactmoe.profile(layer) if place == 2 else nullcontext():
                times[place].append(run(call, layer.device))
    return tuple(map(statistics.median, times))


def captured(layer: MoELayer, x: torch.Tensor, rounds: int) -> tuple[float, ...]:
    """Replays of a call that was captured with the profile off, off again, and on."""
    graphs = []
    for on in (False, False, True):
        graph = torch.cuda.CUDAGraph()
        with exactmoe.profile(layer) if on else nullcontext(), torch.cuda.graph(graph):
            layer(x)
        graphs.append(graph)
    times: tuple[list[float], ...] = ([], [], [])
    for _ in range(rounds):
        for place, graph in enumerate(graphs):
            times[place].append(run(graph.replay, layer.device))
    return tuple(map(statistics.median, times))


def line(name: str, times: tuple[float, ...]) -> str:
    """A row of the table."""
    off, again, on = times
    noise, cost = 100 * abs(again / off - 1), on - min(off, again)
    return f"{name:<22}{off:>10.1f}{again:>10.1f}{on:>10.1f}{noise:>8.1f} %{cost:>10.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", default=None, help="glm, deepseek, small, or H,I,E,K")
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=31)
    given = parser.parse_args()
    device = torch.device(given.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    name = given.shape or ("glm" if device.type == "cuda" else "small")
    layer, hidden = build(name, device)
    machine = fingerprint(device)
    print(f"{machine.get('card', machine['cpu'])}, torch {machine['torch']}, shape {name}")
    spent = timeit.timeit(lambda: layer.spans is None, timer=time.process_time, number=CHECKS)
    check = 1e9 * spent / CHECKS
    print(f"the check of a layer that is not profiled: {check:.0f} ns a piece of a call")
    titles = "".join(f"{title:>10}" for title in ("off", "again", "on", "noise", "on costs"))
    print(f"{'microseconds a call':<22}{titles}")
    for width in given.widths:
        x = draw_x(width, hidden, device)
        expected = layer(x)
        with exactmoe.profile(layer):
            if not torch.equal(layer(x).view(torch.int16), expected.view(torch.int16)):
                raise SystemExit("bits differ while the layer is profiled")
        times = measured(layer, lambda x=x: layer(x), given.rounds)
        print(line(f"{width} tokens, eager", times), flush=True)
        if device.type == "cuda":
            print(line(f"{width} tokens, captured", captured(layer, x, given.rounds)), flush=True)


def draw_x(width: int, hidden: int, device: torch.device) -> torch.Tensor:
    """bfloat16 [T, H]."""
    generator = torch.Generator(device).manual_seed(width)
    return torch.randn(width, hidden, device=device, generator=generator).bfloat16()


if __name__ == "__main__":
    main()
