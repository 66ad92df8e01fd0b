"""convert_checkpoint: NVFP4 between the dialects of ModelOpt and compressed-tensors.

Codes and block scales stay as they are. ModelOpt multiplies by a global scale, compressed-tensors
divides by one, so the scale becomes its reciprocal, rounded to float32. The way back exists only
where the reciprocal of the reciprocal is the scale again.
"""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from exactmoe.checkpoint.dialects import (
    COMPRESSED_TENSORS_NVFP4,
    MODELOPT_NVFP4,
    Dialect,
)
from exactmoe.checkpoint.index import Checkpoint
from exactmoe.checkpoint.plan import Source, Stored
from exactmoe.checkpoint.rewrite.engine import Job, Made, Progress, Row, run
from exactmoe.checkpoint.rewrite.files import Entry, RawFiles, output_folder
from exactmoe.checkpoint.rewrite.published import output_config
from exactmoe.checkpoint.rewrite.units import (
    Projection,
    Rewriting,
    Unit,
    complete_plans,
    input_scales,
    layer_units,
    replaced_names,
    require_whole_stacks,
)
from exactmoe.errors import ConfigError, Unsupported

DIALECTS = {"modelopt": MODELOPT_NVFP4, "compressed-tensors": COMPRESSED_TENSORS_NVFP4}
_INPUT_SCALE = {"modelopt": ("input_scale", ()), "compressed-tensors": ("input_global_scale", (1,))}
# float32's smallest normal: engines that flush what is smaller would divide by zero.
_LEAST = 2.0**-126


def convert_checkpoint(
    source: str | Path,
    out: str | Path,
    dialect: str,
    *,
    lossy: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
) -> tuple[list[Row], tuple[str, ...]]:
    """Writes a checkpoint of NVFP4 weights in another dialect; a killed run continues.

    Args:
        source: folder of the input.
        out: folder of the output, new or empty, or begun by the same request.
        dialect: "modelopt" or "compressed-tensors".
        lossy: also where a global scale does not come back.
        workers, progress: as in `quantize_checkpoint`.

    Returns:
        A row per converted projection (exact: its scale comes back), and notes.

    Raises:
        ConfigError: an argument that is not allowed, or a scale does not come back.
        CheckpointError: the input is broken.
        Unsupported: FP4 weights that no dialect of the two has.
    """
    if dialect not in DIALECTS:
        raise ConfigError(f"dialect is {dialect!r}; allowed: {', '.join(DIALECTS)}")
    folder, checkpoint = output_folder("out", out), Checkpoint(source)
    rewriting = _plan(checkpoint, dialect)
    job = Job(
        checkpoint,
        folder,
        {"command": "convert", "dialect": dialect, "lossy": lossy},
        rewriting,
        lambda unit, raw: [_converted(unit, p, raw, lossy) for p in unit.projections],
        output_config(checkpoint, DIALECTS[dialect], rewriting),
    )
    return run(job, workers, progress), rewriting.notes


def _plan(checkpoint: Checkpoint, dialect: str) -> Rewriting:
    target, notes = DIALECTS[dialect], list[str]()

    def wanted(found: Dialect, source: Source) -> Dialect | None:
        if found is target or found.format in ("bf16", "fp8"):
            return None
        if found.format != "nvfp4":
            info = source.parts[found.parts[0]].info
            raise Unsupported(f"{info} is {found.name}; allowed: NVFP4 (quantize casts MXFP4)")
        return target

    units: list[Unit] = []
    for plan in complete_plans(checkpoint, notes):
        for unit in layer_units(checkpoint, plan, "all", wanted):
            made = tuple(_with_input_scale(checkpoint, p, dialect) for p in unit.projections)
            units.append(replace(unit, projections=made))
    if not units:
        raise ConfigError(
            f"{checkpoint.path} has no NVFP4 weight in another dialect than {dialect}"
        )
    require_whole_stacks(checkpoint, units)
    return Rewriting(tuple(units), replaced_names(checkpoint, units), tuple(notes))


def _with_input_scale(checkpoint: Checkpoint, projection: Projection, dialect: str) -> Projection:
    found = input_scales(checkpoint, projection.source)
    for info in found.values():
        if info.dtype != "F32" or info.shape not in ((), (1,)):
            raise Unsupported(f"{info} is no scale of one projection; it cannot be converted")
    if not found:
        return projection
    if len(found) > 1:
        names = " and ".join(info.name for info in found.values())
        raise Unsupported(f"{names} are scales of one projection; allowed: one of them")
    word, shape = _INPUT_SCALE[dialect]
    entry, (info, *_) = Entry(f"{projection.base}.{word}", "F32", shape), found.values()
    return replace(projection, extra=(entry,), input_scale=info)


def _converted(unit: Unit, projection: Projection, raw: RawFiles, lossy: bool) -> Made:
    before = raw.weight(projection.source, projection.rows, projection.columns)
    assert before.global_scale is not None
    scale, exact, dialect = before.global_scale, True, projection.source.dialect
    if dialect.global_scale_op != unit.target.global_scale_op:
        scale, exact = _reciprocal(scale, projection.base, lossy)
    after = replace(before, global_scale=scale, global_scale_op=unit.target.global_scale_op)
    extra = []
    for entry in projection.extra:
        assert projection.input_scale is not None
        value = raw.tensor(Stored(projection.input_scale)).reshape(-1)
        # Stacked experts' is ModelOpt's already.
        if not projection.input_scale.name.endswith(entry.name.rpartition(".")[2]):
            value, comes_back = _reciprocal(value, entry.name, lossy)
            exact = exact and comes_back
        extra.append((entry.name, value))
    row = Row(projection.base, projection.what, dialect.name, unit.target.name, exact)
    return Made(after, row, tuple(extra))


def _reciprocal(scale: Tensor, name: str, lossy: bool) -> tuple[Tensor, bool]:
    """1 / scale in float32, and whether 1 / that is the scale again."""
    made = 1.0 / scale
    usable = torch.isfinite(made) & (made >= _LEAST) & (scale >= _LEAST)
    if not bool(usable.all()):
        raise Unsupported(
            f"{name}: the scale is {float(scale[0])}; allowed: positive, finite and normal in "
            "float32, and its reciprocal too"
        )
    exact = torch.equal(1.0 / made, scale)
    if not exact and not lossy:
        raise ConfigError(
            f"{name}: the scale {float(scale[0])!r} does not come back from its reciprocal; "
            "allowed without --lossy: scales that do"
        )
    return made, exact
