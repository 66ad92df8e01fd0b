"""`exactmoe bench`: time of one MoE block over the width, beside what the machine can do."""

import sys
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer

from exactmoe import bench
from exactmoe.bench import Record, Settings
from exactmoe.cli import options
from exactmoe.cli.output import print_json, print_table, status
from exactmoe.errors import ConfigError
from exactmoe.formats import FP4_FORMATS
from exactmoe.plan import architecture_name, tile
from exactmoe.plan.tiles import TILES
from exactmoe.proof import fingerprint

WIDTHS = {"cuda": (1, 2, 4, 8, 16, 64, 256, 1024, 4096), "cpu": (1, 2, 4, 8, 16, 64)}
_MOST_TILE = 1 << 20
SECONDS = {"cuda": 0.2, "cpu": 0.3}


@dataclass(frozen=True, kw_only=True)
class What(options.Common):
    """Options that say what is timed. Defaults depend on the device."""

    shape: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="glm, deepseek, small, or H,I,E,K."),
    ] = None
    format: Annotated[
        str | None, typer.Option(metavar="nvfp4|mxfp4", help="By default the shape's.")
    ] = None
    numerics: options.NumericsClass = None
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="cuda, cuda:1 or cpu; by default a card.")
    ] = None
    backend: Annotated[str, typer.Option(help="One of our paths, or auto.")] = "auto"
    widths: Annotated[str | None, typer.Option(metavar="LIST", help="Tokens a call.")] = None
    parts: Annotated[str, typer.Option(metavar="LIST", help="Of experts, sort, block, dense.")] = (
        ",".join(bench.PARTS)
    )
    peers: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="all, none, or names; by default all on a card."),
    ] = None
    tiles: Annotated[
        str | None, typer.Option(metavar="LIST", help="Tiles that are forced and timed too.")
    ] = None
    cliff: Annotated[
        bool, typer.Option("--cliff", help="Neighbouring widths: none may cost much more.")
    ] = False

    def settings(self, seed: int) -> Settings:
        """Checked; ConfigError names the option."""
        device = _device(self.device)
        usual = "glm" if device.type == "cuda" else "small"
        shape = bench.parse_shape(usual if self.shape is None else self.shape)
        format = shape.format if self.format is None else self.format
        if format not in FP4_FORMATS:
            raise ConfigError(f"--format is {format!r}; allowed: {', '.join(FP4_FORMATS)}")
        widths: tuple[int, ...] = WIDTHS[device.type]
        options.checked_backend(self.backend)
        options.check_switches()
        if self.cliff:
            widths = bench.cliff_widths(_tiles(shape, device), max(WIDTHS[device.type]))
        if self.widths is not None:
            widths = options.integers("--widths", self.widths, options.MOST_WIDTH)
        by_default = "all" if device.type == "cuda" and not self.cliff else "none"
        peers = by_default if self.peers is None else self.peers
        return Settings(
            shape=shape,
            format=format,
            numerics=options.checked_numerics(self.numerics) or "a16",
            device=device,
            backend=self.backend,
            widths=tuple(sorted(set(widths))),
            parts=("experts",) if self.cliff else tuple(self.parts.split(",")),
            peers=tuple(peers.split(",")),
            tiles=() if self.tiles is None else options.integers("--tiles", self.tiles, _MOST_TILE),
            seed=seed,
        )


def command(
    what: What,
    seconds: Annotated[
        float | None, typer.Option(min=0.0, help="Of replays, for each number.")
    ] = None,
    csv: Annotated[str | None, typer.Option(metavar="FILE", help="Write every number.")] = None,
    plot: Annotated[
        str | None, typer.Option(metavar="FILE", help="Draw time and share of the floor.")
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=options.MOST_SEED, help="Chooses weights and experts.")
    ] = 0,
) -> None:
    """Time experts, block and dense parts; bits are verified first."""
    settings = what.settings(seed)
    options.require_writable("--csv", csv)
    options.require_writable("--plot", plot, options.PICTURES)
    records: list[Record] = []
    same: dict[str, Any] = {}
    try:
        with progress(not what.json) as say, torch.no_grad():
            timer = bench.timer_of(settings.device, seconds or SECONDS[settings.device.type])
            measured = bench.Bench(settings, timer, say)
            same = described(measured)
            for record in measured.records():
                records.append(record)
    except KeyboardInterrupt:
        if records:
            show(what, measured, records)
        raise
    finally:
        # What was measured is kept, whatever ended the run.
        if csv is not None and records:
            bench.write_csv(csv, records, same)
    if plot is not None:
        bench.write_plot(plot, records, f"{same['shape']}, {same['format']}: {same['machine']}")
    show(what, measured, records)


def described(measured: bench.Bench) -> dict[str, Any]:
    """What all numbers of a run share: machine, versions, shape, ceilings."""
    settings = measured.settings
    machine = fingerprint(measured.problem.device)
    shape = settings.shape
    sizes = f"H {shape.hidden_size}, I {shape.intermediate_size}, {shape.num_experts} experts"
    return {
        "machine": machine.get("card", machine["cpu"]),
        "torch": machine["torch"],
        "exactmoe": machine["exactmoe"],
        "shape": f"{shape.name} ({sizes}, top {shape.top_k})",
        "format": settings.format,
        "numerics": settings.numerics,
        "backend": measured.layer.plan().backend,
        "ceilings": measured.ceilings.describe(),
    }


def show(what: What, measured: bench.Bench, records: list[Record]) -> None:
    """Tables on stdout, or JSON."""
    found = bench.steps(records) if what.cliff else []
    same = described(measured)
    if what.json:
        steps = [{"text": str(step), "ok": step.ok} for step in found]
        print_json({**same, "records": [r.to_dict() for r in records], "steps": steps})
        return
    for table in bench.tables(records):
        print_table(table)
    for line in bench.notes(records):
        typer.echo(line)
    for step in found:
        if not step.ok:
            typer.echo(str(step))
    if what.cliff:
        cliffs = sum(not step.ok for step in found)
        typer.echo(f"{len(found)} steps, {cliffs} cliffs")
    typer.echo(str(measured.layer.plan()))
    typer.echo("\n".join(f"{name}: {value}" for name, value in same.items()))


def _tiles(shape: bench.Shape, device: torch.device) -> Callable[[int], Hashable]:
    """The tiles that all our paths of a card would take for a width; a CPU has none."""
    if device.type == "cpu":
        return lambda width: None
    name, experts = architecture_name(device), shape.num_experts

    def of(width: int) -> Hashable:
        slots = width * shape.top_k
        kinds = ((backend, op) for backend in TILES for op in ("gate_up", "down"))
        return tuple(tile(backend, name, op, slots, experts) for backend, op in kinds)

    return of


def _device(name: str | None) -> torch.device:
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"--device is {name!r}; allowed: cpu, cuda, cuda:N") from None
    if device.type not in WIDTHS:
        raise ConfigError(f"--device is {name!r}; allowed: cpu, cuda, cuda:N")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(f"--device is {name!r} and torch sees no card; allowed: cpu")
        if device.index is not None:
            torch.cuda.set_device(device)
        device = torch.device("cuda", torch.cuda.current_device())
    return device


@contextmanager
def progress(show: bool) -> Iterator[Callable[[str], None]]:
    """A status line on a terminal; elsewhere a line of stderr for each step, with the seconds."""
    if sys.stderr.isatty() or not show:
        with status(show) as say:
            yield say
        return
    start = time.perf_counter()
    yield lambda text: typer.echo(f"{time.perf_counter() - start:6.1f} s  {text}", err=True)
