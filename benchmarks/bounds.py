"""What bounds the routed experts on an sm_90 card: times without parts of the kernels, the clock of
the SMs and the power of the card.

    python benchmarks/bounds.py                                        # GLM's shape, NVFP4, a16
    python benchmarks/bounds.py --shape deepseek --format mxfp4 --numerics a8 --csv bounds.csv
    python benchmarks/bounds.py --tokens 64 4096 --parts "codes not unpacked" "nothing multiplied"

Results of a build without a part are wrong. Each time is of a replay that another one precedes:
"rested" with a pause before the two, "hot" without, for half a second, where a card reaches its
power limit and lowers its clock. The clock is read inside the last kernel of a replay; watts are
what nvidia-smi says while the hot replays run.
"""

import argparse
import csv
import io
import math
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from cuda.bindings import driver
from kernel_parts import PARTS, Without

from exactmoe import MoELayer
from exactmoe.bench import Shape, parse_shape
from exactmoe.bench.ours import Presorted, Scratch
from exactmoe.bench.problem import draw_problem, draw_selections
from exactmoe.errors import ExactMoEError, Unsupported
from exactmoe.kernels.cuda.compile import Kernel
from exactmoe.kernels.cuda.source import Pack, Variant
from exactmoe.ops.cuda import experts
from exactmoe.runtime.workspace import release_captures

ROTATED, PAUSE, RESTED, HOT_SECONDS = 5, 0.03, 7, 0.5


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        without: a key of kernel_parts.PARTS, or "" for the whole kernel.
        rested_us, hot_us: of a call, medians.
        rested_ghz, hot_ghz: of the SM's clock.
        watts: of the card during the hot replays; NaN where nvidia-smi has no number.
    """

    machine: str
    torch: str
    shape: str
    format: str
    numerics: str
    tokens: int
    without: str
    rested_us: float
    rested_ghz: float
    hot_us: float
    hot_ghz: float
    watts: float


class Builds:
    """Stands for ops.cuda.experts.kernel: loads kernels without a part, and reads their clocks."""

    def __init__(self, part: str) -> None:
        self._part = part
        self._loaded: dict[Variant | Pack, Kernel] = {}
        self._last: Kernel | None = None

    def __call__(self, variant: Variant | Pack) -> Kernel:
        if variant not in self._loaded:
            timed = Without(variant, self._part) if isinstance(variant, Variant) else variant
            self._loaded[variant] = Kernel(timed)
        if isinstance(variant, Variant):
            self._last = self._loaded[variant]
        return self._loaded[variant]

    def ghz(self) -> float:
        """Of the last launch of the kernel that was asked for last."""
        assert self._last is not None
        error, address, size = driver.cuLibraryGetGlobal(self._last._library, b"clocks")
        assert error == driver.CUresult.CUDA_SUCCESS, error
        read = np.zeros(size // 8, np.uint64)
        (error,) = driver.cuMemcpyDtoH(read.ctypes.data, address, size)
        assert error == driver.CUresult.CUDA_SUCCESS, error
        return float(read[2] - read[0]) / float(read[3] - read[1])


def once(graph: torch.cuda.CUDAGraph) -> float:
    """Microseconds of a call, of the second of two replays: the first covers the launch."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3 / ROTATED


def asked_power() -> "subprocess.Popen[str]":
    """nvidia-smi, on its way to tell the card's watts."""
    card = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    query = ["--query-gpu=power.draw.instant", "--format=csv,noheader,nounits"]
    return subprocess.Popen(["nvidia-smi", "-i", card, *query], stdout=subprocess.PIPE, text=True)


def measured(graph: torch.cuda.CUDAGraph, builds: Builds) -> tuple[float, ...]:
    """Row's numbers."""
    rested, clocks = [], []
    for _ in range(RESTED):
        time.sleep(PAUSE)
        rested.append(once(graph))
        clocks.append(builds.ghz())
    hot, begin, power = [], time.monotonic(), None
    while power is None or power.poll() is None or time.monotonic() < begin + HOT_SECONDS:
        hot.append(once(graph))
        if power is None and time.monotonic() > begin + HOT_SECONDS / 2:
            power = asked_power()
    told = power.communicate()[0].strip()
    if power.returncode:
        raise Unsupported(f"nvidia-smi ended with status {power.returncode}; it said {told!r}")
    watts = float(told) if told.replace(".", "").isdigit() else math.nan
    return (*map(statistics.median, (rested, clocks, hot)), builds.ghz(), watts)


def drawn_layer(given: argparse.Namespace) -> tuple[Shape, MoELayer, torch.Generator]:
    """The shape, in the format that is asked for, and a layer of random experts."""
    shape, device = parse_shape(given.shape), torch.device("cuda:0")
    shape = replace(shape, format=given.format or shape.format)
    generator = torch.Generator(device).manual_seed(0)
    bank = draw_problem(shape, shape.format, device, generator).bank()
    return shape, MoELayer(shape.config(given.numerics), bank, backend="cuda"), generator


def rows(given: argparse.Namespace) -> Iterator[Row]:
    """All lines, as they are measured."""
    shape, layer, generator = drawn_layer(given)
    machine, device = torch.cuda.get_device_name(0), layer.device
    for tokens in given.tokens:
        selections = draw_selections(shape, tokens, ROTATED, device, generator)
        scratch = Scratch(layer, tokens)
        calls = [Presorted(layer, selection, scratch) for selection in selections]
        for part in ("", *given.parts):
            builds = Builds(part)
            with mock.patch.object(experts, "kernel", builds):
                for call in calls:
                    call()
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    for call in calls:
                        call()
            same = (machine, torch.__version__, shape.name, shape.format, given.numerics)
            yield Row(*same, tokens, part, *measured(graph, builds))
            del graph
            release_captures(device)


def write(given: argparse.Namespace) -> None:
    """Each line as it is measured: on stdout, and into the CSV file if there is one."""
    with given.csv.open("w", newline="") if given.csv else nullcontext(io.StringIO()) as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        writer.writeheader()
        for row in rows(given):
            print(
                f"{row.tokens:6} {row.without or 'all of it':20} rested {row.rested_us:8.1f} us "
                f"{row.rested_ghz:.2f} GHz, hot {row.hot_us:8.1f} us {row.hot_ghz:.2f} GHz "
                f"{row.watts:4.0f} W",
                flush=True,
            )
            writer.writerow(asdict(row))
            file.flush()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="glm")
    parser.add_argument("--format", choices=("nvfp4", "mxfp4"), help="by default the shape's")
    parser.add_argument("--numerics", default="a16", choices=("a16", "a8"))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 1024, 4096])
    parser.add_argument("--parts", nargs="*", choices=tuple(PARTS), default=tuple(PARTS))
    parser.add_argument("--csv", type=Path)
    given = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        sys.exit("bounds.py needs a card of architecture sm_90")
    if shutil.which("nvidia-smi") is None:
        sys.exit("bounds.py needs nvidia-smi, which tells the card's power")
    try:
        write(given)
    except (ExactMoEError, OSError) as error:
        sys.exit(f"bounds.py: {error}")


if __name__ == "__main__":
    main()
