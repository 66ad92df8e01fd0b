"""Strides: how the caller's tensors lie in memory, and which integers hold the ids."""

from dataclasses import replace

import torch
from torch import Tensor

from exactmoe.proof.trial import Trial

_STREAM, _TOKENS = 70, 9


def strides(trial: Trial) -> None:
    """Inputs as views of wider and of transposed memory, other integers as ids; zero tokens."""
    batch = trial.random(_TOKENS, _STREAM)
    expected = trial.run(batch)
    for name, change in {
        "views of wider memory": _in_wider,
        "transposed views": _transposed,
    }.items():
        trial.compare("strides", name, expected, trial.run(batch.map(change)))
    if batch.expert_ids is not None:
        other = replace(batch, expert_ids=batch.expert_ids.long())
        trial.compare("strides", "int64 ids", expected, trial.run(other))
    if batch.token_ids is not None:
        other = replace(batch, token_ids=batch.token_ids.int())
        trial.compare("strides", "int32 token ids", expected, trial.run(other))
    trial.run(batch.rows(slice(0, 0)))


def _in_wider(tensor: Tensor) -> Tensor:
    """The same values with a stride of two between elements, other numbers in between."""
    wider = torch.ones(*tensor.shape, 2, dtype=tensor.dtype, device=tensor.device)
    wider[..., 0] = tensor
    return wider[..., 0]


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.t().contiguous().t() if tensor.ndim == 2 else tensor.flip(0).contiguous().flip(0)
