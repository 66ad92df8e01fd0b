"""Routed experts on two cards beside one: times, bytes between the cards, and a model of others.

    python benchmarks/cards.py                                    # two CPU cards, a small block
    python benchmarks/cards.py --cards cuda:0,cuda:0 --shape glm  # two streams of one GPU
    python benchmarks/cards.py --cards cuda:0,cuda:1 --shape glm --csv cards.csv
    python benchmarks/cards.py --cards cuda:0,cuda:0 --link-gbs 450,50 --link-wait-us 2

Bits first: every form must give the bytes of one card. Times are medians of graph replays over
random selections of experts (on a CPU, of the clock), `eager` those of calls back to back.

The model says what two real cards would give where the times are of one GPU's streams:
    two cards = max(owner, out + peer + back) + extra,  out, back = wait + bytes / rate,
where `owner` and `peer` are one card's times for the experts of each (measured), and `extra` is
what `serial` takes beyond the two: launches, lookups, copies within the card, the merge.
"""

import argparse
import csv
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from exactmoe import ExpertBank, Limits, MoELayer, Placement, ops
from exactmoe.bank import Partition
from exactmoe.bench import parse_shape, timer_of
from exactmoe.bench.problem import Selection, draw_problem, draw_selections
from exactmoe.runtime.devices import resolve
from exactmoe.runtime.workspace import release_captures

BACK_TO_BACK = 30
NARROW, WIDE = 12, 4  # selections, up to 256 tokens and above
FORMS = ("slots", "partials", "serial slots", "serial partials")


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        form: "one card", "owner" and "peer" (one card with the experts of each), one of FORMS, or
            "model ... at R GB/s".
        us, low_us, high_us: of a call in a graph; eager_us: back to back. NaN where not measured.
        speedup: over one card, by `us`.
        out_bytes, back_bytes: to the peer and from it, of a call.
    """

    shape: str
    numerics: str
    cards: str
    width: int
    form: str
    us: float
    low_us: float
    high_us: float
    eager_us: float
    speedup: float
    out_bytes: int
    back_bytes: int


@dataclass(frozen=True, eq=False)
class Bench:
    """What is timed."""

    names: tuple[str, ...]
    one: MoELayer
    several: dict[str, MoELayer]
    partition: Partition
    seconds: float

    def of_card(self, selection: Selection, card: int) -> Selection:
        """The selection without the experts of other cards."""
        ids = selection.expert_ids
        owners = torch.tensor(self.partition.owners, device=ids.device)
        kept = torch.where(owners[ids.long()] == card, ids, torch.full_like(ids, -1))
        return Selection(selection.x, kept, selection.weights)


def build(arguments: argparse.Namespace) -> Bench:
    shape = parse_shape(arguments.shape)
    names = tuple(arguments.cards.split(","))
    device = resolve(names[0])
    generator = torch.Generator(device).manual_seed(0)
    bank = draw_problem(shape, arguments.format or shape.format, device, generator).bank()
    limits, config = Limits(max_rows=max(arguments.widths)), shape.config(arguments.numerics)
    partition = Partition.even(shape.num_experts, len(names))
    split = bank.split(partition, names, keep=True)
    several = {
        form: MoELayer(
            config,
            split,
            placement=Placement(names, None, form.split()[-1], form.startswith("serial")),
            limits=limits,
        )
        for form in FORMS
    }
    one = MoELayer(config, ExpertBank(*bank.weights()), limits=limits)
    return Bench(names, one, several, partition, arguments.seconds)


def calls_of(layer: MoELayer, selections: Sequence[Selection]) -> list[Callable[[], Tensor]]:
    """One call a selection, each into memory of its own."""

    def call(s: Selection) -> Callable[[], Tensor]:
        y = torch.empty_like(s.x)
        return lambda: layer.experts(s.x, s.expert_ids, s.weights, out=y)

    return [call(selection) for selection in selections]


def eager(calls: Sequence[Callable[[], Tensor]], devices: Sequence[torch.device]) -> float:
    """Microseconds of a call, of runs of them back to back."""

    def wait() -> None:
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    samples = []
    for _ in range(5):
        wait()
        start = time.perf_counter()
        for number in range(BACK_TO_BACK):
            calls[number % len(calls)]()
        wait()
        samples.append((time.perf_counter() - start) * 1e6 / BACK_TO_BACK)
    return statistics.median(samples)


def measure(bench: Bench, arguments: argparse.Namespace) -> Iterator[Row]:
    shape = parse_shape(arguments.shape)
    device = bench.one.device
    generator = torch.Generator(device).manual_seed(1)
    storage = ops.path(bench.one.plan().path).storage
    for width in arguments.widths:
        count = NARROW if width <= 256 else WIDE
        selections = draw_selections(shape, width, count, device, generator)
        wanted = [call().clone() for call in calls_of(bench.one, selections)]
        times: dict[str, float] = {}

        def row(form: str, layer: MoELayer, given: Sequence[Selection], width: int = width) -> Row:
            calls = calls_of(layer, given)
            found = [call().clone() for call in calls]
            if form in FORMS:
                for y, expected in zip(found, wanted, strict=True):  # noqa: B023
                    if not torch.equal(y.view(torch.int16), expected.view(torch.int16)):
                        raise SystemExit(f"{form} at {width} tokens differs from one card")
            replay = timer_of(device, bench.seconds).capture(calls)
            timing = replay.time()
            replay.run()
            if form in FORMS:
                for y, expected in zip(replay.outputs, wanted, strict=True):  # noqa: B023
                    if not torch.equal(y.view(torch.int16), expected.view(torch.int16)):
                        raise SystemExit(f"{form} at {width} tokens differs in a graph")
            del replay
            if device.type == "cuda":
                torch.cuda.synchronize(device)
                release_captures(device)
            times[form] = timing.us  # noqa: B023
            traffic = (0, 0)
            if layer.cards is not None:
                bytes_ = layer.cards.traffic(width, layer.config, storage)
                traffic = (bytes_.out, bytes_.back)
            return Row(
                arguments.shape,
                arguments.numerics,
                arguments.cards,
                width,
                form,
                timing.us,
                timing.low_us,
                timing.high_us,
                eager(calls, layer.devices),
                times["one card"] / timing.us,  # noqa: B023
                *traffic,
            )

        yield row("one card", bench.one, selections)
        for name, card in (("owner", 0), ("peer", 1)):
            yield row(name, bench.one, [bench.of_card(s, card) for s in selections])
        for form in FORMS:
            last = row(form, bench.several[form], selections)
            yield last
            if form in ("serial slots", "serial partials"):
                yield from modelled(last, times, arguments)


def modelled(serial: Row, times: dict[str, float], arguments: argparse.Namespace) -> Iterator[Row]:
    """What two cards would give over links of each rate."""
    extra = max(serial.us - times["owner"] - times["peer"], 0.0)
    for rate in arguments.link_gbs:
        out, back = (
            arguments.link_wait_us + nbytes / (rate * 1e3)
            for nbytes in (serial.out_bytes, serial.back_bytes)
        )
        us = max(times["owner"], out + times["peer"] + back) + extra
        form = f"model {serial.form.split()[-1]} at {rate:g} GB/s"
        nothing = float("nan")
        yield Row(
            serial.shape,
            serial.numerics,
            serial.cards,
            serial.width,
            form,
            us,
            nothing,
            nothing,
            nothing,
            times["one card"] / us,
            serial.out_bytes,
            serial.back_bytes,
        )


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cards", default="cpu,cpu", help="two device names")
    parser.add_argument("--shape", default="small", help="glm, deepseek, small, or H,I,E,K")
    parser.add_argument("--numerics", default="a16", choices=("a16", "a8"))
    parser.add_argument("--format", choices=("nvfp4", "mxfp4"), help="default: the shape's")
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 8, 64, 512, 4096])
    parser.add_argument("--seconds", type=float, default=0.5, help="of replays a measurement")
    parser.add_argument("--link-gbs", type=numbers, default=[450.0, 50.0], help="GB/s one way")
    parser.add_argument("--link-wait-us", type=float, default=3.0, help="from a write to a read")
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    if len(arguments.cards.split(",")) != 2:
        parser.error(f"--cards is {arguments.cards!r}; allowed: two names with a comma between")
    return arguments


def main() -> None:
    arguments = parse()
    bench = build(arguments)
    device = bench.one.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    print(f"{name}, torch {torch.__version__}, {bench.one.plan().backend}, {arguments.numerics}")
    for line in bench.several["slots"].explain(1).cards:
        print(f"  {line}")
    print(f"{'tokens':>6} {'form':<26} {'us':>9} {'eager us':>9} {'x':>6} {'out':>11} {'back':>11}")
    rows = []
    for row in measure(bench, arguments):
        rows.append(row)
        print(
            f"{row.width:>6} {row.form:<26} {row.us:>9.1f} {row.eager_us:>9.1f} "
            f"{row.speedup:>6.3f} {row.out_bytes:>11} {row.back_bytes:>11}",
            flush=True,
        )
    if arguments.csv is not None:
        with arguments.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(Row)])
            writer.writeheader()
            writer.writerows(asdict(row) for row in rows)


if __name__ == "__main__":
    main()
