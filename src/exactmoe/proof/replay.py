"""Record what enters every MLP block of a model, and replay it in chunks (field fault A23).

A whole prompt runs once. Then the recorded rows go through each block again, in chunks as decode,
speculative verify and prefill would cut them, and every byte must be the one of the whole prompt.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from exactmoe.dense import DenseMLP
from exactmoe.errors import ConfigError
from exactmoe.layer import MoELayer
from exactmoe.proof.batch import Batch, Entry
from exactmoe.proof.report import Report

SIZES = (1, 2, 3, 5, 8, 64)

Block = tuple[int, nn.Module, MoELayer | DenseMLP]


@dataclass(frozen=True, eq=False)
class Recorded:
    """One call of one MLP block.

    Attributes:
        index: of the model's layer.
        entry: our layer's whole block, or dense MLP.
        batch: x bfloat16 [T, H] that entered, and token ids [T] for a hash layer.
        y: [T, H], what the block gave to the model.
    """

    index: int
    entry: Entry
    batch: Batch
    y: Tensor


@contextmanager
def recording(blocks: Sequence[Block]) -> Iterator[list[Recorded]]:
    """While it lasts, every call of the blocks is added to the list it gives.

    Args:
        blocks: (layer index, block module, our layer), as `exactmoe.hf.blocks(model)` gives them.
            A block is called with hidden states [..., H], and `input_ids` [...] if it needs them.
    """
    calls: list[Recorded] = []
    handles = [
        block.register_forward_hook(_recorder(calls, index, layer), with_kwargs=True)
        for index, block, layer in blocks
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _recorder(
    calls: list[Recorded], index: int, layer: MoELayer | DenseMLP
) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Tensor], None]:
    entry = Entry("dense" if isinstance(layer, DenseMLP) else "block", layer)

    def record(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], y: Tensor) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        token_ids = None
        if entry.is_hashed:
            ids = args[1] if len(args) > 1 else kwargs["input_ids"]
            token_ids = ids.reshape(-1).clone()
        x = hidden.reshape(-1, hidden.shape[-1]).clone()
        calls.append(Recorded(index, entry, Batch(x, token_ids), y.reshape(x.shape).clone()))

    return record


def replay(
    calls: Sequence[Recorded],
    sizes: Sequence[int] = SIZES,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Run recorded calls again, whole and in chunks, and compare with what the model got.

    Args:
        calls: from `recording`.
        sizes: tokens a chunk; the last chunk of a call may be shorter.
        progress: called with a line for each block before it runs.

    Raises:
        ConfigError: nothing was recorded, or a size below 1.
    """
    if not calls or not sizes or min(sizes) < 1:
        raise ConfigError(
            f"{len(calls)} recorded calls, chunks of {tuple(sizes)}; allowed: at least one call, "
            "sizes from 1"
        )
    start = time.perf_counter()
    tokens = max(call.batch.width for call in calls)
    blocks = len({call.index for call in calls})
    report = Report(f"replay of {tokens} tokens, {blocks} blocks")
    for call in calls:
        if progress is not None:
            progress(f"{report.subject}: layer {call.index}")
        case = f"layer {call.index}"
        report.compare("whole prompt", case, call.y, call.entry(call.batch))
        for size in sizes:
            for first in range(0, call.batch.width, size):
                rows = slice(first, first + size)
                y = call.entry(call.batch.rows(rows))
                where = f"{case}, chunk from token {first}"
                report.compare(f"chunks of {size}", where, call.y[rows], y)
    report.seconds = time.perf_counter() - start
    return report
