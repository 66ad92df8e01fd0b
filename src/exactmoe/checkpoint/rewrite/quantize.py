"""quantize_checkpoint: BF16, FP8 or FP4 weights of a checkpoint to NVFP4 or MXFP4.

NVFP4 is written as ModelOpt does; MXFP4 as DeepSeek does under DeepSeek-V4's published config, else
as compressed-tensors does. A shared scale of gate and up is what engines that join them read.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from exactmoe.checkpoint.dialects import (
    COMPRESSED_TENSORS_MXFP4,
    DEEPSEEK_MXFP4,
    MODELOPT_NVFP4,
    PLAIN_BF16,
    Dialect,
)
from exactmoe.checkpoint.index import Checkpoint
from exactmoe.checkpoint.linears import fp8_linears
from exactmoe.checkpoint.plan import Source
from exactmoe.checkpoint.quantize import Quantization
from exactmoe.checkpoint.rewrite.casts import (
    exact_cast,
    float_values,
    joined,
    prove_equal,
    rows_of,
    sqnr,
)
from exactmoe.checkpoint.rewrite.engine import Job, Made, Progress, Row, run
from exactmoe.checkpoint.rewrite.files import RawFiles, output_folder
from exactmoe.checkpoint.rewrite.published import is_deepseek_fp8, output_config
from exactmoe.checkpoint.rewrite.units import (
    WHAT,
    Projection,
    Rewriting,
    Unit,
    complete_plans,
    layer_units,
    replaced_names,
    require_whole_stacks,
)
from exactmoe.errors import CheckpointError, ConfigError, Unsupported
from exactmoe.formats import PackedWeight, quantize
from exactmoe.formats.packed import require_columns


@dataclass(frozen=True)
class QuantizeRequest:
    """What to quantise and how.

    Attributes:
        format: "nvfp4" or "mxfp4".
        rule: how scales are chosen (formats/quantize.py); None: the publisher's.
        what: "routed" experts; "routed+shared": shared experts too; "all": dense MLPs too.
        lossy: values may change. Without it only exact casts of FP4 weights are made.

    Raises:
        ConfigError: a value that is not allowed.
    """

    format: str
    rule: str | None = None
    what: str = "routed"
    lossy: bool = False

    def __post_init__(self) -> None:
        Quantization(self.format, self.rule)
        if self.what not in WHAT:
            raise ConfigError(f"what is {self.what!r}; allowed: {', '.join(WHAT)}")


def quantize_checkpoint(
    source: str | Path,
    out: str | Path,
    request: QuantizeRequest,
    workers: int | None = None,
    progress: Progress | None = None,
) -> tuple[list[Row], tuple[str, ...]]:
    """Quantises a checkpoint, shard by shard; a killed run continues with the same arguments.

    Args:
        source: folder of the input.
        out: folder of the output, new or empty, or begun by the same request.
        request: what and how.
        workers: threads; None: torch's, at most 4. Each holds gate and up of one expert.
        progress: called with bytes of the input that are done with.

    Returns:
        A row per rewritten projection, and notes.

    Raises:
        ConfigError: an argument that is not allowed, or a value would change without `lossy`.
        CheckpointError: the input is broken; names file and tensor.
        Unsupported: weights that the format, or the dialect's config, cannot hold.
    """
    folder, checkpoint = output_folder("out", out), Checkpoint(source)
    target = _target(checkpoint, request)
    rewriting = _plan(checkpoint, request, target)
    job = Job(
        checkpoint,
        folder,
        {"command": "quantize", **request.__dict__},
        rewriting,
        lambda unit, raw: _make(unit, raw, request),
        output_config(checkpoint, target, rewriting),
    )
    return run(job, workers, progress), rewriting.notes


def _target(checkpoint: Checkpoint, request: QuantizeRequest) -> Dialect:
    if is_deepseek_fp8(checkpoint):
        if request.what != "routed":
            raise Unsupported(
                f"what is {request.what!r}; allowed for {checkpoint.path}: routed (its config, "
                "DeepSeek-V4's, has no word for a shared expert in FP4)"
            )
        return MODELOPT_NVFP4 if request.format == "nvfp4" else DEEPSEEK_MXFP4
    return MODELOPT_NVFP4 if request.format == "nvfp4" else COMPRESSED_TENSORS_MXFP4


def _plan(checkpoint: Checkpoint, request: QuantizeRequest, target: Dialect) -> Rewriting:
    notes: list[str] = []

    def wanted(dialect: Dialect, source: Source) -> Dialect | None:
        info = source.parts[dialect.parts[0]].info
        if dialect.format == request.format and dialect.global_scale_op != target.global_scale_op:
            raise Unsupported(
                f"{info} is {dialect.name}, the output {target.name}; exactmoe convert --dialect "
                "modelopt comes first"
            )
        if dialect is target:
            return None
        if dialect.format in ("bf16", "fp8") and not request.lossy:
            raise ConfigError(
                f"{info} is {dialect.name}, and {request.format} cannot hold all of its values; "
                "allowed without --lossy: exact casts of FP4 weights"
            )
        return target

    units: list[Unit] = []
    for plan in complete_plans(checkpoint, notes):
        units += layer_units(checkpoint, plan, request.what, wanted)
    for unit in units:
        for p in unit.projections:
            try:
                require_columns(request.format, p.columns)
            except Unsupported as error:
                raise Unsupported(f"{p.base}: {error}") from error
    if not units:
        raise ConfigError(
            f"{checkpoint.path} holds its {request.what} weights as {target.name} already"
        )
    require_whole_stacks(checkpoint, units)
    replaced = replaced_names(checkpoint, units)
    others = _fp8_to_bf16(checkpoint, replaced) if not is_deepseek_fp8(checkpoint) else []
    if others:
        if not request.lossy:
            name = others[0].projections[0].base
            raise ConfigError(
                f"{name} is FP8 and becomes BF16 beside {target.name}; allowed without --lossy: "
                "checkpoints without FP8"
            )
        notes.append(
            f"{len(others)} FP8 weights became BF16: no reader knows 128x128 blocks beside "
            f"{target.name}"
        )
    return Rewriting((*units, *others), replaced | replaced_names(checkpoint, others), tuple(notes))


def _fp8_to_bf16(checkpoint: Checkpoint, replaced: frozenset[str]) -> list[Unit]:
    """The FP8 weights that are left, wherever they stand."""
    left = [info for info in checkpoint.tensors.values() if info.name not in replaced]
    return [
        Unit(PLAIN_BF16, (Projection("other", base, plan.sources[0], plan.rows, plan.columns),))
        for base, plan in fp8_linears(left).items()
    ]


def _make(unit: Unit, raw: RawFiles, request: QuantizeRequest) -> Sequence[Made]:
    before = [raw.weight(p.source, p.rows, p.columns) for p in unit.projections]
    if unit.target is PLAIN_BF16:
        values = [PackedWeight("bf16", float_values(w).bfloat16()) for w in before]
        triples = zip(unit.projections, before, values, strict=True)
        return [_made(unit, p, old, new) for p, old, new in triples]
    if before[0].format == request.format:
        # The same bytes under other names: stacked ones become one set per expert.
        after: list[PackedWeight] | None = before
    else:
        after = _exact(before, request.format)
    if after is not None:
        for p, old, new in zip(unit.projections, before, after, strict=True):
            prove_equal(old, new, p.base)
        return [
            Made(new, _row(unit, p, exact=True))
            for p, new in zip(unit.projections, after, strict=True)
        ]
    if not request.lossy:
        names = " and ".join(p.base for p in unit.projections)
        raise ConfigError(
            f"the scales of {names} have no exact {request.format} form; allowed without --lossy: "
            "exact casts"
        )
    after = _quantized(unit, before, request)
    return [
        _made(unit, p, old, new)
        for p, old, new in zip(unit.projections, before, after, strict=True)
    ]


def _exact(before: list[PackedWeight], format: str) -> list[PackedWeight] | None:
    if format == "mxfp4":
        casts = [exact_cast(weight, format) for weight in before]
        found = [cast for cast in casts if cast is not None]
        return found if len(found) == len(before) else None
    try:
        whole = joined(before)
    except Unsupported:  # together they span more binades than MXFP4 may
        return None
    cast = None if whole is None else exact_cast(whole, format)
    return None if cast is None else _split(cast, before)


def _quantized(
    unit: Unit, before: list[PackedWeight], request: QuantizeRequest
) -> list[PackedWeight]:
    values = torch.cat([float_values(weight).float() for weight in before], 1)
    name = unit.projections[0].source.parts[unit.projections[0].source.dialect.parts[0]]
    try:
        whole = quantize(values, request.format, request.rule)
    except ConfigError as error:
        message = re.sub(r"\bexpert 0, ", "", str(error))
        raise CheckpointError(f"{name} (and what shares its scale): {message}") from error
    except Unsupported as error:
        raise Unsupported(f"{name}: {error}") from error
    return _split(whole, before)


def _split(whole: PackedWeight, like: list[PackedWeight]) -> list[PackedWeight]:
    start, parts = 0, []
    for weight in like:
        parts.append(rows_of(whole, start, start + weight.rows))
        start += weight.rows
    return parts


def _row(unit: Unit, projection: Projection, exact: bool) -> Row:
    before, after = projection.source.dialect.name, unit.target.name
    return Row(projection.base, projection.what, before, after, exact)


def _made(unit: Unit, projection: Projection, old: PackedWeight, new: PackedWeight) -> Made:
    row = _row(unit, projection, exact=False)
    return Made(new, replace(row, sqnr_db=sqnr(old, new)))
