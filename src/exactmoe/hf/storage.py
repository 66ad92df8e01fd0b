"""Our layers over the parameters of transformers' modules: views of them, never a second copy.

The stored form is read from the parameters themselves: bfloat16; uint8 codes with E4M3 block scales
and a global scale or divisor (NVFP4); int8 codes with E8M0 block scales or their bytes (MXFP4);
E4M3 codes with a float32 scale per 128 x 128 (FP8).
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from exactmoe.bank import ExpertBank, Router
from exactmoe.config import Limits, RouterConfig
from exactmoe.dense import DenseMLP
from exactmoe.errors import Unsupported
from exactmoe.formats import BLOCK, PackedWeight
from exactmoe.hf.conversions import DIVISOR, GLOBAL_SCALE, SCALE
from exactmoe.ops import CANONICAL

# transformers' own FP8Experts names its scales so.
_SCALE_INV = "_scale_inv"
_FP4_SCALES = {torch.float8_e8m0fnu: "mxfp4", torch.uint8: "mxfp4", torch.float8_e4m3fn: "nvfp4"}
_FP8_SCALES = {torch.float32: "fp8"}


class LayerCache:
    """One built layer, kept while the tensors that it was built over are the same memory."""

    _layer: Any = None
    _key: tuple[Any, ...] = ()
    _slots: tuple[tuple[dict[str, Any], str], ...] = ()

    def get(self, module: nn.Module, build: Callable[[], Any], *extra: Any) -> Any:
        """The layer at hand, or `build()` if a tensor of the module or one of `extra` changed."""
        if self._layer is None or self._key != self._now(extra):
            self.to_canonical()
            self._slots = tuple(_slots(module))
            # Views made in inference mode would not count writes to their parameters.
            with torch.inference_mode(False), torch.no_grad():
                self._layer, self._key = build(), self._now(extra)
        return self._layer

    @property
    def arranged(self) -> ExpertBank | None:
        """The bank whose bytes are in another than canonical order, if there is one."""
        bank = getattr(self._layer, "bank", None)
        return None if bank is None or bank.layout == CANONICAL else bank

    def to_canonical(self) -> None:
        """Put the module's parameters in the order that everybody else reads."""
        if (bank := self.arranged) is not None:
            bank.arrange(CANONICAL)

    def _now(self, extra: tuple[Any, ...]) -> tuple[Any, ...]:
        slots = self._slots
        return (*extra, *(_place(holder[name]) for holder, name in slots if name in holder))

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the module has memory of its own, so it builds its own layer.
        return {}


def _slots(module: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """Where the module and its children hold their parameters and buffers."""
    for part in module.modules():
        for holder in (part._parameters, part._buffers):
            yield from ((holder, name) for name, tensor in holder.items() if tensor is not None)


def _place(tensor: Tensor) -> tuple[Any, ...]:
    version = 0 if tensor.is_inference() else tensor._version
    return (tensor.data_ptr(), tensor.dtype, tensor.shape, version)


def move_bytes(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool) -> nn.Module:
    """What `module._apply(fn)` does, but no dtype changes (field fault A16)."""

    def as_bytes(tensor: Tensor) -> Tensor:
        # Integers are never cast, so what `fn` would do to the dtype does not reach the values.
        flat = tensor.reshape(1) if tensor.ndim == 0 else tensor
        return fn(flat.view(torch.uint8)).view(tensor.dtype).reshape(tensor.shape)

    return type(module)._apply(module, as_bytes, recurse)


def refuse_gradients(module: nn.Module, *inputs: Tensor) -> None:
    """Unsupported where autograd would expect gradients of the inputs or of the parameters."""
    if not torch.is_grad_enabled():
        return
    if any(t.requires_grad for t in (*inputs, *module.parameters())):
        raise Unsupported(
            "the call needs gradients; this is inference only: run it under torch.no_grad()"
        )


def bank(experts: nn.Module, fixed_order: bool = False) -> ExpertBank:
    """Experts of a module with `gate_up_proj` [E, 2I, H], gate first, and `down_proj` [E, H, I]."""
    weights = {
        projection: _weight(experts, name, rows, number)
        for projection, (name, rows, number) in _places(experts).items()
    }
    return ExpertBank(weights["gate"], weights["up"], weights["down"], fixed_order)


def _places(experts: nn.Module) -> dict[str, tuple[str, slice, int]]:
    """Projection -> its parameter, its rows there, and its number among the global scales."""
    inner = experts.gate_up_proj.shape[1] // 2  # type: ignore[union-attr,index]
    return {
        "gate": ("gate_up_proj", slice(0, inner), 0),
        "up": ("gate_up_proj", slice(inner, 2 * inner), 1),
        "down": ("down_proj", slice(None), 0),
    }


def canonical_parameters(experts: nn.Module, bank: ExpertBank) -> dict[str, Tensor]:
    """Copies in host memory, in canonical order, of the parameters with codes and block scales of
    FP4 experts; one projection at a time is converted beside them.
    """
    copies: dict[str, Tensor] = {}
    for projection, (name, rows, _) in _places(experts).items():
        weight = bank.packed(projection)
        for parameter, part in ((name, weight.codes), (_scales_name(experts, name), weight.scales)):
            if part is None:
                continue
            if parameter not in copies:
                copies[parameter] = torch.empty_like(_tensor(experts, parameter), device="cpu")
            copies[parameter].view(torch.uint8)[:, rows].copy_(part)
    return copies


def format_of(experts: nn.Module) -> str:
    """Stored format of an experts module: "bf16", "nvfp4", "mxfp4" or "fp8"."""
    scales = _scales(experts, "gate_up_proj")
    return "bf16" if scales is None else (_FP4_SCALES | _FP8_SCALES)[scales.dtype]


def _weight(experts: nn.Module, name: str, rows: slice, projection: int) -> PackedWeight:
    codes, scales = _tensor(experts, name)[:, rows], _scales(experts, name)
    if scales is None:
        return PackedWeight("bf16", codes)
    if codes.dtype == torch.float8_e4m3fn:
        # Each projection has blocks of its own, the last of its rows perhaps a smaller one.
        count = -(-codes.shape[1] // BLOCK["fp8"])
        own = scales[:, projection * count : (projection + 1) * count]
        return PackedWeight("fp8", codes.view(torch.uint8), own)
    codes, blocks = codes.view(torch.uint8), scales[:, rows].view(torch.uint8)
    if _FP4_SCALES[scales.dtype] == "mxfp4":
        return PackedWeight("mxfp4", codes, blocks)
    suffix, op = _global_scale(experts, name)
    # E floats, copied: a column of [E, 2] is not contiguous.
    global_scale = _tensor(experts, name + suffix)[:, projection].clone()
    return PackedWeight("nvfp4", codes, blocks, global_scale, op)


def _scales(module: nn.Module, name: str) -> Tensor | None:
    suffixed = _scales_name(module, name)
    if not suffixed:
        return None
    scales = _tensor(module, suffixed)
    is_fp8 = _tensor(module, name).dtype == torch.float8_e4m3fn
    allowed = _FP8_SCALES if is_fp8 else _FP4_SCALES
    if scales.dtype not in allowed:
        names = ", ".join(f"{dtype} ({format})" for dtype, format in allowed.items())
        raise Unsupported(f"{suffixed} is {scales.dtype}; allowed: {names}")
    return scales


def _scales_name(module: nn.Module, name: str) -> str:
    """Name of the block scales beside a parameter; empty where there are none."""
    names = (name + suffix for suffix in (SCALE, _SCALE_INV))
    return next((found for found in names if hasattr(module, found)), "")


def _global_scale(module: nn.Module, name: str) -> tuple[str, str]:
    """Suffix of the parameter with the global scales, and what is done with them."""
    return (DIVISOR, "divide") if hasattr(module, name + DIVISOR) else (GLOBAL_SCALE, "multiply")


def _tensor(module: nn.Module, name: str) -> Tensor:
    return getattr(module, name).detach()  # type: ignore[no-any-return]


def router(gate: nn.Module, config: RouterConfig) -> Router:
    """The router of a gate module.

    It has `weight` [E, H], and `e_score_correction_bias` [E] or, in a hash layer, `tid2eid` [V, K].
    """
    bias = getattr(gate, "e_score_correction_bias", None)
    table = getattr(gate, "tid2eid", None)
    return Router(_tensor(gate, "weight"), bias=bias, table=table, config=config)


def dense_mlp(
    mlp: nn.Module, swiglu_limit: float | None, limits: Limits | None = None, backend: str = "auto"
) -> DenseMLP:
    """A dense MLP of linear modules: `gate_proj`, `up_proj` [I, H], `down_proj` [H, I].

    Each holds a bfloat16 weight, or a packed one.
    """
    names = ("gate_proj", "up_proj", "down_proj")
    gate, up, down = (linear_weight(getattr(mlp, name)) for name in names)
    return DenseMLP(gate, up, down, swiglu_limit=swiglu_limit, limits=limits, backend=backend)


def linear_weight(linear: nn.Module) -> Tensor | PackedWeight:
    """The weight of a linear module, a view of its parameters: [N, K], or packed [1, N, K]."""
    weight, scales = _tensor(linear, "weight"), _scales(linear, "weight")
    if scales is None:
        return weight
    codes = weight.view(torch.uint8)[None]
    if weight.dtype == torch.float8_e4m3fn:
        return PackedWeight("fp8", codes, scales[None])
    blocks = scales.view(torch.uint8)[None]
    if _FP4_SCALES[scales.dtype] == "mxfp4":
        return PackedWeight("mxfp4", codes, blocks)
    suffix, op = _global_scale(linear, "weight")
    global_scale = _tensor(linear, "weight" + suffix).reshape(1)
    return PackedWeight("nvfp4", codes, blocks, global_scale, op)
