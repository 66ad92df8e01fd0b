"""The door of a layer: what a caller gives is checked here, once; messages hold the values."""

from collections.abc import Mapping

import torch
from torch import Tensor

from exactmoe.errors import ConfigError, Unsupported

OUTPUT_DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


def _require_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise ConfigError(f"{name} is {type(value).__name__}; allowed: a tensor")
    if value.layout != torch.strided:
        raise ConfigError(f"{name} has layout {value.layout}; allowed: torch.strided")


def _require_place(name: str, value: Tensor, device: torch.device) -> None:
    """On the layer's device, and outside autograd."""
    if value.device != device:
        raise ConfigError(f"{name} is on {value.device}; the layer's weights are on {device}")
    if value.requires_grad and torch.is_grad_enabled():
        raise Unsupported(
            f"{name} requires a gradient; this is inference only: call it under torch.no_grad()"
        )


def check_x(x: Tensor, hidden_size: int, device: torch.device) -> None:
    """x must be bfloat16 [T, hidden_size] on `device`, outside autograd."""
    _require_tensor("x", x)
    if x.dtype != torch.bfloat16:
        raise Unsupported(f"x is {x.dtype}; allowed: torch.bfloat16 (nothing is cast silently)")
    if x.ndim != 2 or x.shape[1] != hidden_size:
        raise ConfigError(f"x has shape {tuple(x.shape)}; allowed: [T, {hidden_size}]")
    _require_place("x", x, device)


def check_routes(
    expert_ids: Tensor, weights: Tensor, num_tokens: int, top_k: int, device: torch.device
) -> None:
    """ids int32 or int64 [T, K], weights float32 [T, K], K at most the layer's top_k; on `device`,
    outside autograd.
    """
    _require_tensor("expert_ids", expert_ids)
    _require_tensor("weights", weights)
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
    _require_place("expert_ids", expert_ids, device)
    _require_place("weights", weights, device)


def check_token_ids(token_ids: Tensor | None, num_tokens: int, table: Tensor | None) -> None:
    """A hash layer needs the token ids, int32 or int64 [T] on its device; each must be a row of its
    table (checked on a CPU).
    """
    if table is None:
        return
    if token_ids is None:
        raise ConfigError("token_ids are missing; a hash layer takes its expert ids from them")
    _require_tensor("token_ids", token_ids)
    if token_ids.dtype not in (torch.int32, torch.int64) or tuple(token_ids.shape) != (num_tokens,):
        raise ConfigError(
            f"token_ids are {token_ids.dtype} {tuple(token_ids.shape)}; "
            f"allowed: int32, int64 [{num_tokens}]"
        )
    _require_place("token_ids", token_ids, table.device)
    if token_ids.device.type == "cpu" and num_tokens:
        low, high = int(token_ids.min()), int(token_ids.max())
        if low < 0 or high >= table.shape[0]:
            raise ConfigError(
                f"token_ids run from {low} to {high}; allowed: 0 to {table.shape[0] - 1}"
            )


def output(
    out: Tensor | None,
    inputs: Mapping[str, Tensor],
    own: Mapping[str, Tensor],
    hidden_size: int,
    output_type: str,
) -> Tensor:
    """`out` after checks, or a new y: [T, hidden_size] of the output type, the only allocation of a
    call. `inputs` are the call's tensors by name, x among them, and `own` those of the layer; `out`
    may share memory with none.
    """
    x = inputs["x"]
    shape, dtype = (x.shape[0], hidden_size), OUTPUT_DTYPES[output_type]
    if out is None:
        return torch.empty(shape, dtype=dtype, device=x.device)
    _require_tensor("out", out)
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
    _require_place("out", out, x.device)
    if not out.numel():
        return out
    start, end = _storage_addresses(out)
    for name, given in (*inputs.items(), *own.items()):
        other_start, other_end = _storage_addresses(given)
        if max(start, other_start) < min(end, other_end):
            raise ConfigError(f"out shares memory with {name}; allowed: memory of its own")
    return out


def _storage_addresses(tensor: Tensor) -> tuple[int, int]:
    """First address of a tensor's storage and the one after its last.

    Two storages may overlap: each numpy view given to torch makes one.
    """
    storage = tensor.untyped_storage()
    start = storage.data_ptr()
    return start, start + storage.nbytes()
