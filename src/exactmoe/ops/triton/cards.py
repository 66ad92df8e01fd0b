"""What several cards add to the path of one: launchers of kernels/triton/cards.py."""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from exactmoe.errors import ConfigError
from exactmoe.kernels.triton import cards as kernels
from exactmoe.ops.cards import Word

_IDS, _WORDS, _LANES = 1024, 1024, 512
_MOST_PARTS = 4


def look_up(expert_ids: Tensor, tables: Tensor, found: Tensor) -> None:
    """Arguments as in ops/cards.py, so all of them here."""
    num_slots, num_tables = expert_ids.numel(), tables.shape[0]
    if num_slots == 0:
        return
    block = min(_IDS, triton.next_power_of_2(num_slots))
    kernels.look_up[(triton.cdiv(num_slots, block), num_tables)](
        expert_ids, tables, found, num_slots, NUM_EXPERTS=tables.shape[1] - 2, BLOCK=block
    )


def take_slots(owners: Tensor, card: int, returned: Tensor, slots: Tensor) -> None:
    """The slots of one card, as raw words."""
    source, target = _words(returned), _words(slots)
    if target.numel() == 0:
        return
    words = target.shape[1]
    block = min(_WORDS, triton.next_power_of_2(words))
    kernels.take_slots[(target.shape[0], triton.cdiv(words, block))](
        owners, source, target, CARD=card, WORDS=words, BLOCK=block
    )


def count_served(owners: Tensor, own: Tensor, served: Tensor, lost: Tensor) -> None:
    """Whether all slots of the call were served, in one launch."""
    num_slots = owners.numel()
    block = min(4096, max(32, triton.next_power_of_2(num_slots)))
    kernels.count_served[(1,)](
        owners, own, served, lost, num_slots, PEERS=served.numel(), BLOCK=block
    )


def combine_partials(
    vectors: Tensor, first_groups: Sequence[int], shared: Tensor | None, y: Tensor
) -> None:
    """The tree of the 8 groups over the vectors, each in the place of its first group."""
    num_tokens, hidden = y.shape
    if num_tokens == 0:
        return
    places = sum((vector + 1) << (4 * group) for vector, group in enumerate(first_groups))
    block = min(_LANES, triton.next_power_of_2(hidden))
    kernels.combine_partials[(num_tokens, triton.cdiv(hidden, block))](
        vectors,
        vectors.stride(0),
        vectors if shared is None else shared,
        y,
        HIDDEN=hidden,
        PLACES=places,
        SHARED=shared is not None,
        BLOCK=block,
        enable_fp_fusion=False,
    )


def carry(parts: Sequence[tuple[Tensor, Tensor]], word: Word | None = None) -> None:
    """Copies the bytes of up to 4 contiguous tensors, from memory of another card that is mapped
    into this one. A graph may hold it, which it may not hold of a copy between two GPUs.

    Args:
        parts: (source, target) of equal sizes, a multiple of 4 bytes.
        word: (source, place, target, place): one int32 more.

    Raises:
        ConfigError: too many parts, or one whose sides differ in size or have gaps.
    """
    if not 1 <= len(parts) <= _MOST_PARTS:
        raise ConfigError(f"parts are {len(parts)}; allowed: 1 to {_MOST_PARTS}")
    sources, targets, counts = [], [], []
    for source, target in parts:
        same = source.nbytes == target.nbytes and source.nbytes % 4 == 0
        if not same or not source.is_contiguous() or not target.is_contiguous():
            raise ConfigError(
                f"{source.nbytes} bytes are carried into {target.nbytes}, contiguous "
                f"{source.is_contiguous()}, {target.is_contiguous()}; allowed: equal multiples "
                "of 4, contiguous"
            )
        sources.append(source.view(-1).view(torch.int32))
        targets.append(target.view(-1).view(torch.int32))
        counts.append(source.nbytes // 4)
    largest = max(counts)
    if largest == 0:
        return
    count = len(parts)
    for column in (sources, targets, counts):
        column += column[:1] * (_MOST_PARTS - count)  # type: ignore[operator]
    single = (sources[0], 0, targets[0], 0) if word is None else word
    kernels.carry[(triton.cdiv(largest, _WORDS), count)](
        *sources, *targets, *counts, *single, PARTS=count, WORD=word is not None, BLOCK=_WORDS
    )


def _words(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32)


class TritonCards:
    """The ops of ops/cards.py."""

    look_up = staticmethod(look_up)
    take_slots = staticmethod(take_slots)
    count_served = staticmethod(count_served)
    combine_partials = staticmethod(combine_partials)
    carry = staticmethod(carry)
