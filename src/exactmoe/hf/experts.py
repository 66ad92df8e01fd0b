"""`experts_implementation="exactmoe"`: routed experts of a model that transformers loaded itself.

A second contract beside whole blocks: the combined experts are rounded to bfloat16 before the model
adds its shared expert. The bits are those of class a16, or of a8 in transformers' FP8Experts with
FP4 weights, at every width. Under torch.compile a call is one custom operation.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from exactmoe.config import MoEConfig, Numerics
from exactmoe.errors import Unsupported
from exactmoe.hf import storage
from exactmoe.hf.adapter import is_silu, register_experts_function, uses_experts_function
from exactmoe.layer import MoELayer
from exactmoe.ops import compiled

NAME = "exactmoe"
# Attribute of an experts module: the class that it runs in, where a quantizer of ours chose one.
NUMERICS = "exactmoe_numerics"

# Flag of an experts module -> what runs here, and why nothing else does.
_FLAGS = {
    "is_transposed": (False, "weights are read as rows of inputs, [E, outputs, inputs]"),
    "has_bias": (False, "nothing here adds a bias"),
    "has_gate": (True, "nothing here computes experts without a gate"),
    "is_concatenated": (True, "the rows of gate have to lie before those of up"),
    "has_post_expert_norm": (False, "nothing here normalises what an expert gives"),
}
_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MODELS = "transformers.models"
_layers: WeakKeyDictionary[nn.Module, storage.LayerCache] = WeakKeyDictionary()


def _clamp(experts: nn.Module, attribute: str) -> float | None:
    return getattr(experts, attribute)  # type: ignore[no-any-return]


def _no_limit(experts: nn.Module) -> None:
    return None


def _fp8_limit(experts: nn.Module) -> float | None:
    for name in ("swiglu_alpha", "gate_softcap"):
        if getattr(experts, name, None) is not None:
            raise Unsupported(
                f"{name} is {getattr(experts, name)}; allowed: None (SwiGLU with at most a clamp)"
            )
    return _clamp(experts, "limit")


# Where an `_apply_gate` was defined -> the clamp that it applies. Any other gate is refused.
_GATES: dict[str, Callable[[nn.Module], float | None]] = {
    "transformers.integrations.moe._default_apply_gate": _no_limit,
    f"{_MODELS}.glm5_next.modeling_glm5_next.Glm5NextTextExperts._apply_gate": partial(
        _clamp, attribute="swiglu_limit"
    ),
    f"{_MODELS}.deepseek_v4.modeling_deepseek_v4.DeepseekV4Experts._apply_gate": partial(
        _clamp, attribute="limit"
    ),
    "transformers.integrations.finegrained_fp8.FP8Experts._apply_gate": _fp8_limit,
}


def experts_forward(
    experts: nn.Module,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    **kwargs: Any,
) -> Tensor:
    """What transformers calls instead of an experts module's own forward.

    Args:
        experts: the module; gate_up_proj [E, 2I, H], down_proj [E, H, I], bfloat16 (or int8 MXFP4
            in FP8Experts).
        hidden_states: bfloat16 [T, H].
        top_k_index: int32 or int64 [T, K]; ids >= num_experts (other ranks' experts) and < 0
            contribute nothing.
        top_k_weights: [T, K], float32, or bfloat16 or float16, which become float32 exactly.

    Returns:
        bfloat16 [T, H].

    Raises:
        Unsupported: a gate, a layout or a dtype that is not known here, or a call that needs
            gradients.
    """
    if torch.compiler.is_compiling():
        dtype = hidden_states.dtype
        return compiled.experts(experts, _run, hidden_states, top_k_index, top_k_weights, dtype)
    return _run(experts, hidden_states, top_k_index, top_k_weights)


def _run(
    experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    layer = layer_of(experts, top_k_index.shape[1])
    num_experts = layer.config.num_experts
    routed = checked_call(experts, hidden_states, top_k_index, top_k_weights, num_experts)
    return layer.experts(hidden_states, *routed)


def checked_call(
    experts: nn.Module, rows: Tensor, top_k_index: Tensor, top_k_weights: Tensor, num_experts: int
) -> tuple[Tensor, Tensor]:
    """Ids and float32 weights of a call, as a layer takes them: ids >= num_experts are absent.

    Raises:
        Unsupported: weights of another dtype, or a call that needs gradients.
    """
    storage.refuse_gradients(experts, rows, top_k_weights)
    if top_k_weights.dtype not in _WEIGHT_DTYPES:
        raise Unsupported(
            f"top_k_weights are {top_k_weights.dtype}; allowed: float32, bfloat16, float16"
        )
    # Absent ids are -1 here; an id >= num_experts would set the layer's fault word.
    return top_k_index.masked_fill(top_k_index >= num_experts, -1), top_k_weights.float()


def layer_of(experts: nn.Module, top_k: int) -> MoELayer:
    """The layer over the module's parameters, built anew when they are other memory."""
    if experts not in _layers:
        _layers[experts] = storage.LayerCache()
    return _layers[experts].get(experts, lambda: _build(experts, top_k), top_k)  # type: ignore[no-any-return]


def _build(experts: nn.Module, top_k: int) -> MoELayer:
    limit = require_known(experts)
    # The parameters stay transformers' own: nothing here sees who else reads them.
    bank = storage.bank(experts, fixed_order=True)
    config = MoEConfig(
        hidden_size=bank.hidden_size,
        intermediate_size=bank.intermediate_size,
        num_experts=bank.num_experts,
        top_k=top_k,
        swiglu_limit=limit,
        numerics=numerics_of(experts),
    )
    return MoELayer(config, bank)


def numerics_of(experts: nn.Module) -> Numerics:
    """The class that a quantizer of ours set; a8 for the stock FP8Experts with FP4 weights.

    On the bf16 units: the parameters stay in canonical order, which no kernel on fp8 units reads.
    """
    default = "a8" if hasattr(experts, "gate_up_proj_scale_inv") else "a16"
    found = Numerics.preset(getattr(experts, NUMERICS, None) or default)
    return replace(found, units="bf16")


def require_known(experts: nn.Module) -> float | None:
    """The clamp of an experts module; Unsupported where it computes what nothing here does."""
    wrong = [
        f"{flag} = {getattr(experts, flag)}; allowed: {allowed} ({reason})"
        for flag, (allowed, reason) in _FLAGS.items()
        if getattr(experts, flag, allowed) != allowed
    ]
    if wrong:
        raise Unsupported(f"{type(experts).__name__} has {'; and '.join(wrong)}")
    return _limit(experts)


def _limit(experts: nn.Module) -> float | None:
    gate = getattr(experts, "_apply_gate", None)
    # An `_apply_gate` set on the instance hides the class's.
    function = getattr(gate, "__func__", gate)
    name = f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', function)}"
    if name not in _GATES:
        known = ", ".join(key.rpartition("transformers.")[2] for key in _GATES)
        raise Unsupported(
            f"{type(experts).__name__} computes its gate by {name}; known here: {known}"
        )
    # Glm5NextTextExperts has no act_fn: its gate calls silu itself.
    activation = getattr(experts, "act_fn", nn.functional.silu)
    if not is_silu(activation):
        raise Unsupported(f"{type(experts).__name__} has activation {activation}; allowed: SiLU")
    return _GATES[name](experts)


def modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name, module) of every experts module whose forward is `experts_forward` now."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if uses_experts_function(module, NAME)
    ]


def register() -> None:
    """Make the name known to transformers. Importing exactmoe.hf does it."""
    register_experts_function(NAME, experts_forward)


__all__ = [
    "NAME",
    "NUMERICS",
    "checked_call",
    "experts_forward",
    "layer_of",
    "modules",
    "numerics_of",
    "register",
    "require_known",
]
