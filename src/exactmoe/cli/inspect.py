"""`exactmoe inspect PATH`: what a checkpoint holds, layer by layer, and where each tensor goes."""

from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.table import Table

from exactmoe.checkpoint import Checkpoint, LayerPlan, LoadReport, Reader, audit, plan_layer
from exactmoe.checkpoint.linears import between_blocks, fp8_linears
from exactmoe.cli import options
from exactmoe.cli.output import open_checkpoint, print_json, print_table, reading
from exactmoe.errors import CheckpointError, Unsupported
from exactmoe.formats.units import MAX_FP8_BINADES
from exactmoe.report.fp8_units import UnitCount, count_units, histogram, total

BAD_CHECKPOINT = 2
_PROJECTIONS = ("gate", "up", "down")


@dataclass(frozen=True)
class Row:
    """One layer.

    Attributes:
        layer: its index.
        kind: "score", "hash" or "dense".
        dialect: of the routed experts, or of the dense MLP.
        format: the same as a PackedWeight format.
        experts, top_k: None in a dense layer.
        hidden_size, intermediate_size: H and I.
        units: matrix units of the class: "bf16", or how many of gate, up and down are exact on fp8
            units; None where that was not read.
        fp8: of gate, up and down: how many experts the fp8 units hold exactly, and how many span
            how many binades; None where that was not read.
        routed_bytes, dense_bytes, router_bytes: of the files; dense also counts a shared expert.
    """

    layer: int
    kind: str
    dialect: str
    format: str
    experts: int | None
    top_k: int | None
    hidden_size: int
    intermediate_size: int
    units: str | None
    fp8: dict[str, UnitCount] | None
    routed_bytes: int
    dense_bytes: int
    router_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        counts = {name: count.to_dict() for name, count in (self.fp8 or {}).items()}
        return {**self.__dict__, "fp8": counts or None}


def command(
    path: options.Path,
    common: options.Common,
    numerics: options.NumericsClass = None,
    headers_only: Annotated[
        bool, typer.Option("--headers-only", help="Read no value: units of a8 stay unknown.")
    ] = False,
) -> None:
    """Show what a checkpoint holds, and where each tensor goes.

    Family, format, experts, matrix units and bytes of each layer, and the load report.
    """
    checkpoint = open_checkpoint(path, options.checked_numerics(numerics))
    report = audit(checkpoint)
    plans = [plan_layer(checkpoint, layer) for layer in range(checkpoint.family.num_layers)]
    rows = _rows(checkpoint, plans, read=not headers_only, show=not common.json)
    linears = _linears(report)
    if common.json:
        print_json(
            {
                "path": str(checkpoint.path),
                "model_type": checkpoint.family.model_type,
                "numerics": checkpoint.family.numerics.to_dict(),
                "layers": [row.to_dict() for row in rows],
                "linears": linears,
                "report": report.to_dict(),
            }
        )
    else:
        print_table(_table(checkpoint, rows))
        _print_units(rows)
        typer.echo(report.text())
        if linears["refused"] is not None:
            typer.echo(f"load_model refuses: {linears['refused']}")
        elif linears["layers"]:
            typer.echo(
                f"of these, {linears['layers']} linear layers in FP8 128x128 "
                f"({linears['bytes']} bytes): load_model runs them, packed"
            )
    if report.errors:
        raise typer.Exit(BAD_CHECKPOINT)


def _linears(report: LoadReport) -> dict[str, Any]:
    """FP8 linear layers between the MLP blocks, or why load_model refuses what lies there."""
    try:
        found = fp8_linears(between_blocks(report))
    except (CheckpointError, Unsupported) as error:
        return {"layers": 0, "bytes": 0, "refused": str(error)}
    return {"layers": len(found), "bytes": _nbytes(found), "refused": None}


def _rows(checkpoint: Checkpoint, plans: list[LayerPlan], read: bool, show: bool) -> list[Row]:
    a8 = checkpoint.family.numerics.activation == "a8"
    counted = [plan for plan in plans if a8 and read and plan.experts and not plan.errors]
    nbytes = sum(_nbytes(plan.experts) for plan in counted)
    with (
        reading(show and bool(counted), nbytes) as progress,
        Reader(checkpoint, progress) as reader,
    ):
        found = {plan.spec.layer: count_units(plan, reader) for plan in counted}
    return [_row(plan, a8, found.get(plan.spec.layer)) for plan in plans]


def _row(plan: LayerPlan, a8: bool, fp8: dict[str, UnitCount] | None) -> Row:
    spec = plan.spec
    weights = plan.experts or plan.dense
    found = [w.dialect for w in weights.values() if w.sources]
    return Row(
        layer=spec.layer,
        kind=spec.routing or spec.kind,
        dialect=", ".join(dict.fromkeys(dialect.name for dialect in found)) or "unknown",
        format=", ".join(dict.fromkeys(dialect.format for dialect in found)) or "unknown",
        experts=None if spec.moe is None else spec.moe.num_experts,
        top_k=None if spec.moe is None else spec.moe.top_k,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        units=_units(plan, a8, fp8),
        fp8=fp8,
        routed_bytes=_nbytes(plan.experts),
        dense_bytes=_nbytes(plan.dense),
        router_bytes=sum(info.nbytes for info in plan.router.values()),
    )


def _nbytes(weights: dict[str, Any]) -> int:
    return sum(info.nbytes for weight in weights.values() for info in weight.tensors)


def _units(plan: LayerPlan, a8: bool, fp8: dict[str, UnitCount] | None) -> str | None:
    """Routed experts only: dense parts run on bf16 units in both classes."""
    if not plan.experts or not a8:
        return "bf16"
    if fp8 is None:
        return None
    counts = [f"{count.exact}/{count.experts}" for count in fp8.values()]
    return "fp8 " + " ".join(dict.fromkeys(counts) if len(set(counts)) == 1 else counts)


def _print_units(rows: list[Row]) -> None:
    """Experts that the fp8 units hold exactly, by layer and projection, and the histogram."""
    counted = [row for row in rows if row.fp8 is not None]
    if not counted:
        return
    made = Table(title="experts that fp8 units hold exactly (class a8)", title_justify="left")
    for name in ("layer", "gate", "up", "down"):
        made.add_column(name)
    for row in counted:
        cells = [] if row.fp8 is None else [str(row.fp8[name]) for name in _PROJECTIONS]
        made.add_row(str(row.layer), *cells)
    print_table(made)
    everything = total(count for row in counted for count in (row.fp8 or {}).values())
    typer.echo(
        f"binades within a 128-wide piece of a row, by expert and projection ({everything.exact} "
        f"of {everything.experts} exact; fp8 units hold {MAX_FP8_BINADES}):"
    )
    typer.echo("\n".join(histogram(everything)))


def _table(checkpoint: Checkpoint, rows: list[Row]) -> Table:
    numerics = checkpoint.family.numerics.activation
    made = Table(
        title=f"{checkpoint.path}: {checkpoint.family.model_type}, class {numerics}",
        title_justify="left",
    )
    for name in ("layer", "kind", "layout", "experts", "H x I", "units"):
        made.add_column(name)
    for name in ("routed bytes", "dense bytes", "router bytes"):
        made.add_column(name, justify="right")
    for row in rows:
        made.add_row(
            str(row.layer),
            row.kind,
            row.dialect,
            "" if row.experts is None else f"{row.top_k} of {row.experts}",
            f"{row.hidden_size} x {row.intermediate_size}",
            row.units or "not read",
            f"{row.routed_bytes:,}",
            f"{row.dense_bytes:,}",
            f"{row.router_bytes:,}",
        )
    return made
