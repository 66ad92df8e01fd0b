"""The door of a layer: what a caller gives is checked here, once; messages hold the values."""

import torch
from torch import Tensor

from exactmoe.errors import ConfigError, Unsupported

OUTPUT_DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


def check_x(x: Tensor, hidden_size: int, device: torch.device) -> None:
    """x must be bfloat16 [T, hidden_size] on `device`, outside autograd."""
    if not isinstance(x, Tensor):
        raise ConfigError(f"x is {type(x).__name__}; allowed: a tensor")
    if x.dtype != torch.bfloat16:
        raise Unsupported(f"x is {x.dtype}; allowed: torch.bfloat16 (nothing is cast silently)")
    if x.ndim != 2 or x.shape[1] != hidden_size:
        raise ConfigError(f"x has shape {tuple(x.shape)}; allowed: [T, {hidden_size}]")
    if x.device != device:
        raise ConfigError(f"x is on {x.device}; the layer's weights are on {device}")
    if x.requires_grad and torch.is_grad_enabled():
        raise Unsupported(
            "x requires a gradient; this is inference only: call it under torch.no_grad()"
        )


def check_routes(expert_ids: Tensor, weights: Tensor, num_tokens: int, top_k: int) -> None:
    """ids int32 or int64 [T, K], weights float32 [T, K], K at most the layer's top_k."""
    if expert_ids.dtype not in (torch.int32, torch.int64):
        raise ConfigError(f"expert_ids are {expert_ids.dtype}; allowed: int32, int64")
    if expert_ids.ndim != 2 or expert_ids.shape[0] != num_tokens or expert_ids.shape[1] > top_k:
        raise ConfigError(
            f"expert_ids have shape {tuple(expert_ids.shape)}; "
            f"allowed: [{num_tokens}, up to {top_k}]"
        )
    if weights.dtype != torch.float32 or weights.shape != expert_ids.shape:
        raise ConfigError(
            f"weights are {weights.dtype} {tuple(weights.shape)}; "
            f"allowed: torch.float32 {tuple(expert_ids.shape)}"
        )


def check_token_ids(token_ids: Tensor | None, num_tokens: int, table: Tensor | None) -> None:
    """A hash layer needs the token ids, int32 or int64 [T]; each must be a row of its table
    (checked on a CPU).
    """
    if table is None:
        return
    if token_ids is None:
        raise ConfigError("token_ids are missing; a hash layer takes its expert ids from them")
    if token_ids.dtype not in (torch.int32, torch.int64) or tuple(token_ids.shape) != (num_tokens,):
        raise ConfigError(
            f"token_ids are {token_ids.dtype} {tuple(token_ids.shape)}; "
            f"allowed: int32, int64 [{num_tokens}]"
        )
    if token_ids.device.type == "cpu" and num_tokens:
        low, high = int(token_ids.min()), int(token_ids.max())
        if low < 0 or high >= table.shape[0]:
            raise ConfigError(
                f"token_ids run from {low} to {high}; allowed: 0 to {table.shape[0] - 1}"
            )


def output(out: Tensor | None, x: Tensor, hidden_size: int, output_type: str) -> Tensor:
    """`out` after checks, or a new y: [T, hidden_size] of the output type, the only allocation of a
    call.
    """
    shape, dtype = (x.shape[0], hidden_size), OUTPUT_DTYPES[output_type]
    if out is None:
        return torch.empty(shape, dtype=dtype, device=x.device)
    if (
        out.dtype != dtype
        or tuple(out.shape) != shape
        or out.device != x.device
        or not out.is_contiguous()
    ):
        raise ConfigError(
            f"out is {out.dtype} {tuple(out.shape)} on {out.device}, "
            f"contiguous {out.is_contiguous()}; "
            f"allowed: {dtype} {shape} on {x.device}, contiguous"
        )
    if out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() and out.numel():
        raise ConfigError("out shares memory with x; allowed: memory of its own")
    return out
