"""Traces of routes as files: .npz, and .parquet, which any program can write and read.

A Parquet trace has a row for each (layer, step, token): `layer`, `step`, `token` integers and
`expert_ids`, a list of integers, of one length in a layer. What a layer is (its experts, hash or
score, tokens lost) stands in the metadata of the schema under "exactmoe.routes"; where a file has
none, who reads it has to say.
"""

import json
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from exactmoe.errors import CheckpointError, ConfigError, Unsupported

SUFFIXES = (".npz", ".parquet")
_FORMAT = 1
_PARTS = ("steps", "tokens", "expert_ids")
_KEY = b"exactmoe.routes"
# Rows of a Parquet row group: some megabytes.
_GROUP = 1 << 20
Ints = NDArray[Any]


class Facts(NamedTuple):
    """Of a layer: how many experts, whether ids come from a table by token id, tokens lost."""

    num_experts: int
    is_hashed: bool
    lost: int = 0


class Arrays(NamedTuple):
    """Of a layer: steps and tokens int64 [N], expert_ids int32 [N, K]."""

    steps: Ints
    tokens: Ints
    expert_ids: Ints


Layers = dict[int, tuple[Facts, Arrays]]


def suffix_of(path: str | Path) -> str:
    """The kind of a trace file; ConfigError for one that is neither."""
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise ConfigError(f"{path} ends with {suffix!r}; allowed: {', '.join(SUFFIXES)}")
    return suffix


def write_npz(path: str | Path, layers: Layers) -> None:
    """format, layers [L], facts [L, 3] (experts, is_hashed, lost), and layer_N_steps,
    layer_N_tokens, layer_N_expert_ids; ids that are out of range as -1 and E.
    """
    arrays: dict[str, Ints] = {
        "format": np.array([_FORMAT]),
        "layers": np.array(list(layers), dtype=np.int64),
        "facts": np.array([facts for facts, _ in layers.values()], dtype=np.int64),
    }
    for layer, (facts, parts) in layers.items():
        narrow = np.int16 if facts.num_experts <= np.iinfo(np.int16).max else np.int32
        ids = np.where(parts.expert_ids < facts.num_experts, parts.expert_ids, facts.num_experts)
        stored = parts._replace(expert_ids=np.maximum(ids, -1).astype(narrow))
        arrays |= {f"layer_{layer}_{name}": getattr(stored, name) for name in _PARTS}
    # numpy's own savez_compressed takes a minute where level 1 takes seconds.
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)


def read_npz(path: str | Path) -> Layers:
    """What `write_npz` wrote; CheckpointError for a file that is missing or no such trace."""
    try:
        with np.load(path, allow_pickle=False) as file:
            if file["format"].tolist() != [_FORMAT]:
                raise CheckpointError(
                    f"{path}: format is {file['format'].tolist()}; allowed: [{_FORMAT}]"
                )
            facts = zip(file["layers"].tolist(), file["facts"].tolist(), strict=True)
            layers = {
                layer: (
                    Facts(experts, bool(hashed), lost),
                    _widened(*(file[f"layer_{layer}_{part}"] for part in _PARTS)),
                )
                for layer, (experts, hashed, lost) in facts
            }
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path} is no trace of routes: {error}") from error
    for layer, (_, parts) in layers.items():
        lengths = {len(part) for part in parts}
        if parts.expert_ids.ndim != 2 or len(lengths) != 1:
            raise CheckpointError(f"{path}: the arrays of layer {layer} differ in length")
    return layers


def _widened(steps: Ints, tokens: Ints, ids: Ints) -> Arrays:
    return Arrays(steps, tokens, ids.astype(np.int32, casting="same_kind", copy=False))


def write_parquet(path: str | Path, layers: Layers) -> None:
    """A row group for each million tokens of a layer.

    Raises:
        Unsupported: pyarrow is not installed.
    """
    arrow, parquet = _pyarrow()
    content = {
        "format": _FORMAT,
        "layers": {str(layer): [*map(int, facts)] for layer, (facts, _) in layers.items()},
    }
    fields = [(name, arrow.int64()) for name in ("layer", "step", "token")]
    schema = arrow.schema([*fields, ("expert_ids", arrow.list_(arrow.int32()))])
    schema = schema.with_metadata({_KEY: json.dumps(content).encode("ascii")})
    with parquet.ParquetWriter(str(path), schema, compression="zstd") as writer:
        for layer, (_, parts) in layers.items():
            for first in range(0, len(parts.steps), _GROUP):
                steps, tokens, ids = (part[first : first + _GROUP] for part in parts)
                ends = np.arange(0, ids.size + 1, ids.shape[1], dtype=np.int32)
                flat = arrow.array(np.ascontiguousarray(ids, dtype=np.int32).reshape(-1))
                columns = [
                    arrow.array(np.full(len(steps), layer, dtype=np.int64)),
                    arrow.array(np.asarray(steps, dtype=np.int64)),
                    arrow.array(np.asarray(tokens, dtype=np.int64)),
                    arrow.ListArray.from_arrays(arrow.array(ends), flat),
                ]
                writer.write_table(arrow.table(columns, schema=schema))


def read_parquet(path: str | Path, known: Mapping[int, Facts] | None = None) -> Layers:
    """A trace that `write_parquet` or another program wrote.

    Args:
        known: facts of the layers, for a file that does not say them.

    Raises:
        CheckpointError: the file is missing, is no such trace, or does not say its facts.
        Unsupported: pyarrow is not installed.
    """
    arrow, parquet = _pyarrow()
    try:
        with parquet.ParquetFile(str(path)) as file:
            metadata = file.schema_arrow.metadata or {}
            facts = dict(_facts(json.loads(metadata[_KEY]))) if _KEY in metadata else None
            parts: dict[int, list[Arrays]] = {}
            for group in range(file.num_row_groups):
                table = file.read_row_group(group, ["layer", "step", "token", "expert_ids"])
                for layer, arrays in _by_layer(table):
                    parts.setdefault(layer, []).append(arrays)
        found = {
            layer: Arrays(*(np.concatenate(part) for part in zip(*of_layer, strict=True)))
            for layer, of_layer in parts.items()
        }
    except (OSError, ValueError, KeyError, TypeError, arrow.ArrowException) as error:
        raise CheckpointError(f"{path} is no trace of routes: {error}") from error
    given = facts if facts is not None else dict(known or {})
    missing = [layer for layer in found if layer not in given]
    if missing:
        raise CheckpointError(f"{path} does not say how many experts layers {missing} have")
    empty = Arrays(*(np.empty(0, dtype=np.int64),) * 2, np.empty((0, 1), dtype=np.int32))
    told = dict.fromkeys((*given, *found)) if facts is not None else found
    return {layer: (given[layer], found.get(layer, empty)) for layer in told}


def _facts(content: Any) -> Iterator[tuple[int, Facts]]:
    if content["format"] != _FORMAT:
        raise ValueError(f"format is {content['format']}; allowed: {_FORMAT}")
    for layer, (experts, hashed, lost) in content["layers"].items():
        yield int(layer), Facts(experts, bool(hashed), lost)


def _by_layer(table: Any) -> Iterator[tuple[int, Arrays]]:
    """The rows of a group, layer by layer, in their order."""
    layers, steps, tokens = (table[name].to_numpy() for name in ("layer", "step", "token"))
    lists = table["expert_ids"].combine_chunks()
    if any(table[name].null_count for name in table.column_names) or lists.flatten().null_count:
        raise ValueError("a value is missing")
    # The lists as a table: their lengths, and the flat values in their order.
    lengths = np.asarray(lists.value_lengths())
    values = lists.flatten().to_numpy().astype(np.int32, casting="same_kind", copy=False)
    for layer in dict.fromkeys(layers.tolist()):
        rows = layers == layer
        count = int(lengths[rows][0])
        if count < 1 or (lengths[rows] != count).any():
            raise ValueError(f"layer {layer} has lists of different lengths")
        ids = values[np.repeat(rows, lengths)] if not rows.all() else values
        step, token = (part[rows].astype(np.int64) for part in (steps, tokens))
        yield int(layer), Arrays(step, token, ids.reshape(-1, count))


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise Unsupported(
            "a .parquet trace needs pyarrow, which is not installed: pip install 'exactmoe[trace]'"
        ) from None
    return pyarrow, pyarrow.parquet
