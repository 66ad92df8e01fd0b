"""`exactmoe inspect PATH`: what a checkpoint holds, layer by layer, and where each tensor goes."""

from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.table import Table

from exactmoe.checkpoint import Checkpoint, LayerPlan, Reader, audit, plan_layer
from exactmoe.cli import options
from exactmoe.cli.output import console, open_checkpoint, print_json, reading
from exactmoe.formats import fp8_exact

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
    routed_bytes: int
    dense_bytes: int
    router_bytes: int


def command(
    path: options.Path,
    common: options.Common,
    numerics: options.NumericsClass = None,
    headers_only: Annotated[
        bool, typer.Option("--headers-only", help="Read no value: units of a8 stay unknown.")
    ] = False,
) -> None:
    """Show family, format, experts, units and bytes of each layer, and the load report."""
    checkpoint = open_checkpoint(path, options.checked_numerics(numerics))
    report = audit(checkpoint)
    plans = [plan_layer(checkpoint, layer) for layer in range(checkpoint.family.num_layers)]
    rows = _rows(checkpoint, plans, read=not headers_only, show=not common.json)
    if common.json:
        print_json(
            {
                "path": str(checkpoint.path),
                "model_type": checkpoint.family.model_type,
                "numerics": checkpoint.family.numerics.to_dict(),
                "layers": [row.__dict__ for row in rows],
                "report": report.to_dict(),
            }
        )
    else:
        console().print(_table(checkpoint, rows))
        typer.echo(report.text())
    if report.errors:
        raise typer.Exit(BAD_CHECKPOINT)


def _rows(checkpoint: Checkpoint, plans: list[LayerPlan], read: bool, show: bool) -> list[Row]:
    a8 = checkpoint.family.numerics.activation == "a8"
    counted = a8 and read
    nbytes = sum(_nbytes(plan.experts) for plan in plans) if counted else 0
    with reading(show and counted, nbytes) as progress, Reader(checkpoint, progress) as reader:
        return [_row(plan, _units(plan, reader if counted else None, a8)) for plan in plans]


def _row(plan: LayerPlan, units: str | None) -> Row:
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
        units=units,
        routed_bytes=_nbytes(plan.experts),
        dense_bytes=_nbytes(plan.dense),
        router_bytes=sum(info.nbytes for info in plan.router.values()),
    )


def _nbytes(weights: dict[str, Any]) -> int:
    return sum(info.nbytes for weight in weights.values() for info in weight.tensors)


def _units(plan: LayerPlan, reader: Reader | None, a8: bool) -> str | None:
    """Routed experts only: dense parts run on bf16 units in both classes."""
    if not plan.experts or not a8:
        return "bf16"
    if reader is None or plan.errors:
        return None
    counts = [int(fp8_exact(reader.weight(plan.experts[name])).sum()) for name in _PROJECTIONS]
    experts = plan.spec.moe.num_experts if plan.spec.moe is not None else 0
    if set(counts) == {experts}:
        return f"fp8 {experts}/{experts}"
    return "fp8 " + " ".join(f"{count}/{experts}" for count in counts)


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
