"""FP8 linear layers between the MLP blocks (attention projections): which tensors make one.

`load_model` runs them; what else lies between the blocks is read by transformers.
"""

from collections.abc import Iterable, Mapping

from exactmoe.checkpoint.audit import LoadReport
from exactmoe.checkpoint.dialects import FP8_DIALECTS, Dialect, Part, detect
from exactmoe.checkpoint.header import TensorInfo
from exactmoe.checkpoint.plan import Source, Stored, WeightPlan
from exactmoe.errors import CheckpointError, Unsupported

WHAT = "FP8 linear layers"
# Rules whose tensors nobody reads. What the other rules cover ("read by transformers") has to find
# its parameter there.
READ_BY_NOBODY = frozenset({"mtp", "input_scale", "kv_scale"})
_CODES = ".weight"


def between_blocks(report: LoadReport) -> list[TensorInfo]:
    """The tensors outside the MLP blocks that a whole model reads."""
    ignored = report.ignored
    return [entry.info for entry in ignored if entry.rule.name not in READ_BY_NOBODY]


def fp8_linears(tensors: Iterable[TensorInfo]) -> dict[str, WeightPlan]:
    """The FP8 linear layers among tensors of a checkpoint that no MLP block takes.

    Returns:
        Name without its last part, "layers.3.attn.wq_a" -> plan of one weight [N, K]. Empty where
        nothing is stored in F8_E4M3.

    Raises:
        CheckpointError: codes whose scales are missing.
        Unsupported: another FP8 layout than one scale for each 128 x 128 block.
    """
    by_name = {info.name: info for info in tensors}
    return {
        name.removesuffix(_CODES): _plan(info, by_name)
        for name, info in by_name.items()
        if info.dtype == "F8_E4M3" and name.endswith(_CODES)
    }


def _plan(codes: TensorInfo, by_name: Mapping[str, TensorInfo]) -> WeightPlan:
    base = codes.name.removesuffix(_CODES)
    suffixes = {part.suffix for dialect in FP8_DIALECTS for part in dialect.parts}
    found = {s: by_name[base + s] for s in sorted(suffixes) if base + s in by_name}
    fits = detect({suffix: info.dtype for suffix, info in found.items()}, FP8_DIALECTS)
    fits = [d for d in fits if all(part.suffix in found for part in d.parts)]
    if len(fits) != 1:
        known = "; ".join(dialect.describe() for dialect in FP8_DIALECTS)
        beside = ", ".join(f"{info.name} {info.dtype}" for s, info in found.items() if s != _CODES)
        error = Unsupported if beside else CheckpointError
        raise error(f"{codes} has {beside or 'no scales'} beside it; known: {known}")
    if len(codes.shape) != 2:
        raise Unsupported(f"{codes}: a linear layer has a weight of 2 dimensions")
    rows, columns = codes.shape
    return WeightPlan(WHAT, rows, columns, [_source(base, fits[0], found, rows, columns)])


def _source(
    base: str, dialect: Dialect, found: Mapping[str, TensorInfo], rows: int, columns: int
) -> Source:
    parts: dict[Part, Stored] = {}
    for part in dialect.parts:
        info, shape = found[part.suffix], part.shape(rows, columns)
        if info.shape != shape:
            raise Unsupported(f"{info}: {dialect.name} asks for {list(shape)}")
        parts[part] = Stored(info)
    return Source(base, dialect, parts)
