"""Our layers over the parameters of transformers' modules: views of them, never a second copy.

The stored form is read from the parameters themselves: bfloat16; uint8 codes with E4M3 block scales
and a global scale or divisor (NVFP4); int8 codes with E8M0 block scales or their bytes (MXFP4);
E4M3 codes with a float32 scale per 128 x 128 (FP8).
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from exactmoe.bank import ExpertBank, Partition, Router, SplitBank
from exactmoe.bank.projections import PROJECTIONS
from exactmoe.bank.split import over
from exactmoe.config import Limits, RouterConfig
from exactmoe.dense import DenseMLP
from exactmoe.errors import Unsupported
from exactmoe.formats import BLOCK, PackedWeight
from exactmoe.hf.conversions import DIVISOR, GLOBAL_SCALE, SCALE
from exactmoe.ops import CANONICAL
from exactmoe.parallel.rank_bank import RankBank

# transformers' own FP8Experts names its scales so.
_SCALE_INV = "_scale_inv"
_FP4_SCALES = {torch.float8_e8m0fnu: "mxfp4", torch.uint8: "mxfp4", torch.float8_e4m3fn: "nvfp4"}
_FP8_SCALES = {torch.float32: "fp8"}
# Below an experts module: the parameters of a card that has memory of its own.
_CARD = "card_"


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
    def arranged(self) -> ExpertBank | SplitBank | None:
        """The bank whose bytes are in another than canonical order, if there is one."""
        bank = getattr(self._layer, "bank", None)
        bank = bank.own if isinstance(bank, RankBank) else bank
        return None if bank is None or bank.layout == CANONICAL else bank

    def to_canonical(self) -> None:
        """Put the module's parameters in the order that everybody else reads."""
        if (bank := self.arranged) is not None:
            for part in [bank] if isinstance(bank, ExpertBank) else bank:
                part.arrange(CANONICAL)

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
    gate, up, down = (_weight(experts, projection) for projection in PROJECTIONS)
    return ExpertBank(gate, up, down, fixed_order)


def _places(experts: nn.Module) -> dict[str, tuple[str, slice, int]]:
    """Projection -> its parameter, its rows there, and its number among the global scales."""
    inner = experts.gate_up_proj.shape[1] // 2  # type: ignore[union-attr,index]
    return {
        "gate": ("gate_up_proj", slice(0, inner), 0),
        "up": ("gate_up_proj", slice(inner, 2 * inner), 1),
        "down": ("down_proj", slice(None), 0),
    }


def card_module(experts: nn.Module, card: int) -> nn.Module:
    """The module with the parameters of a card: the experts module itself for the first one, else
    one below it, which is made when it is first asked for.
    """
    name = f"{_CARD}{card}"
    if card and name not in experts._modules:
        experts.add_module(name, nn.Module())
    return experts.get_submodule(name) if card else experts


def card_modules(experts: nn.Module) -> list[nn.Module]:
    """The modules of all cards: one where the experts lie on one device."""
    return [experts, *(m for name, m in experts.named_children() if name.startswith(_CARD))]


def banks(experts: nn.Module, partition: Partition | None) -> ExpertBank | SplitBank:
    """The experts of a module on their cards. Those that lie on one device are cut in place."""
    modules = card_modules(experts)
    if partition is None or partition.num_cards == 1:
        return bank(experts)
    if len(modules) == 1:
        return over(bank(experts), partition)
    return SplitBank([bank(module) for module in modules], partition)


def whole_parameters(experts: nn.Module, bank: ExpertBank | SplitBank) -> dict[str, Tensor]:
    """The parameters of an experts module as a checkpoint has them: all experts, canonical order.
    Copies in host memory, of what is stored otherwise.
    """
    modules = card_modules(experts)
    if isinstance(bank, ExpertBank):
        return _canonical(experts, bank)
    if len(modules) == 1:
        return {}
    whole: dict[str, Tensor] = {}
    for module, own, owned in zip(modules, bank, bank.partition.experts, strict=True):
        converted = _canonical(module, own)
        for name, parameter in module.named_parameters(recurse=False):
            value = converted.get(name, parameter.detach()).cpu()
            if name not in whole:
                shape = (bank.num_experts, *value.shape[1:])
                whole[name] = torch.empty(shape, dtype=value.dtype)
            whole[name].view(torch.uint8)[list(owned)] = value.view(torch.uint8)
    return whole


def _canonical(experts: nn.Module, bank: ExpertBank) -> dict[str, Tensor]:
    """Copies in host memory, in canonical order, of the parameters with codes and block scales of
    FP4 experts, where the bank has another; one projection at a time is converted beside them.
    """
    copies: dict[str, Tensor] = {}
    for projection, (name, rows, _) in _places(experts).items():
        if bank.layout == CANONICAL:
            break
        weight = bank.packed(projection)
        for parameter, part in ((name, weight.codes), (_scales_name(experts, name), weight.scales)):
            if part is None:
                continue
            if parameter not in copies:
                copies[parameter] = torch.empty_like(_tensor(experts, parameter), device="cpu")
            copies[parameter].view(torch.uint8)[:, rows].copy_(part)
    return copies


def split_state(
    experts: nn.Module, partition: Partition, state_dict: dict[str, Any], prefix: str
) -> None:
    """Turns whole parameters of a state dict into those of the cards' modules, in place."""
    modules = card_modules(experts)
    for name in [n for n, _ in experts.named_parameters(recurse=False)]:
        whole = state_dict.get(prefix + name)
        if len(modules) == 1 or whole is None or len(whole) != partition.num_experts:
            continue
        raw = whole.view(torch.uint8)
        for card, owned in enumerate(partition.experts):
            place = f"{prefix}{_CARD}{card}.{name}" if card else prefix + name
            state_dict[place] = raw[list(owned)].view(whole.dtype)


def is_of_a_card(name: str, prefix: str) -> bool:
    """Whether this is the name of a parameter of another card than the first, below `prefix`."""
    return name.startswith(prefix + _CARD)


def format_of(experts: nn.Module, projection: str = "gate") -> str:
    """Stored format of an experts module: "bf16", "nvfp4", "mxfp4" or "fp8"."""
    scales = _scales(experts, _places(experts)[projection][0])
    return "bf16" if scales is None else (_FP4_SCALES | _FP8_SCALES)[scales.dtype]


def fields_of(experts: nn.Module, projection: str) -> dict[str, Tensor]:
    """The fields of PackedWeight of one projection, [E, ...]: views of the parameters, codes and
    E8M0 and E4M3 scales as bytes.
    """
    name, rows, number = _places(experts)[projection]
    codes, scales = _tensor(experts, name)[:, rows], _scales(experts, name)
    if scales is None:
        return {"codes": codes}
    if codes.dtype == torch.float8_e4m3fn:
        # Each projection has blocks of its own, the last of its rows perhaps a smaller one.
        count = -(-codes.shape[1] // BLOCK["fp8"])
        own = scales[:, number * count : (number + 1) * count]
        return {"codes": codes.view(torch.uint8), "scales": own}
    fields = {"codes": codes.view(torch.uint8), "scales": scales[:, rows].view(torch.uint8)}
    if _FP4_SCALES[scales.dtype] == "nvfp4":
        suffix, _ = _global_scale(experts, name)
        fields["global_scale"] = _tensor(experts, name + suffix)[:, number]
    return fields


def _weight(experts: nn.Module, projection: str) -> PackedWeight:
    fields: dict[str, Any] = dict(fields_of(experts, projection))
    op = "multiply"
    if "global_scale" in fields:
        # E floats, copied: a column of [E, 2] is not contiguous.
        fields["global_scale"] = fields["global_scale"].clone()
        _, op = _global_scale(experts, _places(experts)[projection][0])
    return PackedWeight(format_of(experts, projection), **fields, global_scale_op=op)


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


def linear_format(linear: nn.Module) -> str:
    """Stored format of a linear module: "bf16", "nvfp4", "mxfp4" or "fp8"."""
    scales = _scales(linear, "weight")
    return "bf16" if scales is None else (_FP4_SCALES | _FP8_SCALES)[scales.dtype]


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
