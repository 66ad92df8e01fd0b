"""save_model: a model that load_model loaded, written as its checkpoint was, in bounded memory.

`save_pretrained` gathers all tensors first, and on a GPU's fast path a copy of every expert. Here
one MLP block at a time goes to its places in the shards; a shard gets its name when it is whole,
and config.json comes last.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from exactmoe.bank import SplitBank
from exactmoe.checkpoint import Checkpoint, TensorInfo
from exactmoe.checkpoint.files import DTYPES, Files
from exactmoe.checkpoint.header import read_header
from exactmoe.checkpoint.index import INDEX
from exactmoe.checkpoint.rewrite.files import (
    Entry,
    SameShard,
    ShardWriter,
    copy_file,
    output_folder,
    write_json,
    write_tensor,
)
from exactmoe.errors import CheckpointError, ConfigError, Unsupported
from exactmoe.hf.saving import Origin
from exactmoe.hf.whole_block import blocks
from exactmoe.layer import MoELayer
from exactmoe.runtime.progress import byte_bar

_WEIGHTS = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf")
_CONFIG = "config.json"


def save_model(
    model: Any, folder: str | Path, *, by_card: bool = False, progress: bool = True
) -> None:
    """Writes a model as the checkpoint that it was loaded from: the same names, dtypes and, where
    nothing was changed, bytes. At most one MLP block is copied at a time.

    Args:
        model: of `load_model`.
        folder: new or empty.
        by_card: of a model over several cards: each card's experts in files of its own
            ("card1-model-00001-of-00004.safetensors"), so that a card's load opens no others. The
            folder is a checkpoint like any other. Else: the shards of the checkpoint.
        progress: show a bar on stderr, where that is a terminal.

    Raises:
        ConfigError: the folder is not empty, is the checkpoint's own, or the empty text.
        CheckpointError: the checkpoint's files are gone or changed; they hold what nobody loads.
        Unsupported: the model was not loaded by load_model, a value has no exact form in the
            checkpoint's dtype, or tensors of all experts together cannot be cut by card.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    origin = getattr(quantizer, "origin", None)
    if quantizer is None or not isinstance(origin, Origin):
        raise Unsupported(
            f"{type(model).__name__} was not loaded by load_model as one process's model; allowed: "
            "a model of load_model, or its own save_pretrained"
        )
    source, out = origin.checkpoint.path, output_folder("folder", folder)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already; allowed: a folder that is new or empty")
    owners = _owners(origin, model) if by_card else {}
    out.mkdir(parents=True, exist_ok=True)
    with (
        byte_bar(progress, origin.checkpoint.nbytes, f"saving {out.name}") as done,
        ExitStack() as stack,
    ):
        shards = _Shards(origin.checkpoint, out, owners if by_card else None, done, stack)
        shards.put(origin.other_tensors(model, quantizer._conversions))
        for index, _, layer in blocks(model):
            shards.put(origin.block_tensors(index, layer))
        shards.copy(origin.checkpoint.tensors[name] for name in sorted(origin.unread))
    for path in sorted(source.iterdir()):
        own = path.name.startswith(".") or path.name == _CONFIG
        if path.is_file() and not own and not path.name.endswith(_WEIGHTS):
            copy_file(path, out / path.name)
    if by_card:
        total = {"total_size": origin.checkpoint.nbytes}
        write_json(out / INDEX, {"metadata": total, "weight_map": dict(sorted(shards.map.items()))})
    elif (source / INDEX).is_file():
        copy_file(source / INDEX, out / INDEX)
    copy_file(source / _CONFIG, out / _CONFIG)


def _owners(origin: Origin, model: Any) -> dict[str, int]:
    """Tensor of a routed expert -> the card that owns it."""
    owners: dict[str, int] = {}
    for index, _, layer in blocks(model):
        bank = layer.bank if isinstance(layer, MoELayer) else None
        if not isinstance(bank, SplitBank):
            continue
        for weight in origin.plans[index].experts.values():
            for expert, where in enumerate(weight.sources):
                stacked = next((stored for stored in where.parts.values() if stored.index), None)
                if stacked is not None:
                    raise Unsupported(
                        f"{stacked.info} holds the experts of all cards; allowed by card: "
                        "checkpoints with tensors for each expert"
                    )
                # Activation scales too, which nobody loads.
                for info in origin.checkpoint.leaves(where.base).values():
                    owners[info.name] = bank.partition.owners[expert]
    if not owners:
        raise ConfigError("by_card is True, but the model is on one card; allowed: False")
    return owners


class _Shards:
    """The files that are being written."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        out: Path,
        owners: dict[str, int] | None,
        done: Callable[[int], None],
        stack: ExitStack,
    ) -> None:
        self._checkpoint, self._done = checkpoint, done
        self._files = stack.enter_context(Files(checkpoint.path))
        self.map: dict[str, str] = {}
        groups: dict[str, list[TensorInfo]] = {}
        for info in checkpoint.tensors.values():
            card = "" if owners is None else f"card{owners.get(info.name, 0)}-"
            self.map[info.name] = card + info.file
            groups.setdefault(self.map[info.name], []).append(info)
        self._writers: dict[str, ShardWriter] = {}
        for file, infos in groups.items():
            if owners is None:
                self._require_unchanged(file, infos)
                writer: ShardWriter = SameShard(out / file, checkpoint.path / file, infos)
            else:
                writer = ShardWriter(out / file, [Entry(i.name, i.dtype, i.shape) for i in infos])
            self._writers[file] = stack.enter_context(writer)

    def _require_unchanged(self, file: str, infos: list[TensorInfo]) -> None:
        found = {info.name: info for info in read_header(self._checkpoint.path, file)}
        if found != {info.name: info for info in infos}:
            raise CheckpointError(
                f"{self._checkpoint.path / file} has changed since the model was loaded"
            )

    def put(self, tensors: dict[str, Tensor]) -> None:
        """Writes tensors, wherever they are."""
        for name, tensor in tensors.items():
            info = self._checkpoint.tensors[name]
            if tensor.dtype != DTYPES[info.dtype] or tuple(tensor.shape) != info.shape:
                raise Unsupported(
                    f"{info} is {tensor.dtype} {list(tensor.shape)} in the model now and has no "
                    "exact form in the checkpoint's; allowed: model.save_pretrained"
                )
            write_tensor(self._writers[self.map[name]], name, tensor.detach().cpu())
            self._done(info.nbytes)

    def copy(self, infos: Iterable[TensorInfo]) -> None:
        """Copies tensors that nobody loaded from the checkpoint's files."""
        for info in infos:
            begin = 0
            for chunk in self._files.chunks(info):
                self._writers[self.map[info.name]].write(info.name, chunk, begin)
                begin += len(chunk)
            self._done(info.nbytes)
