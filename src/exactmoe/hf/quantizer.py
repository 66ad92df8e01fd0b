"""The transformers quantizer that keeps FP4 weights packed.

Only parameters change, on the meta device, before anything is loaded: module classes and parameter
names stay, so transformers' own loading, device placement and parallel plans keep working.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from exactmoe.errors import Unsupported
from exactmoe.formats import BLOCK
from exactmoe.hf.adapter import (
    HfQuantizer,
    QuantizationConfigMixin,
    conversions_of,
    decoder_layers,
    destinations,
    register_quantization_config,
    register_quantizer,
    take_conversions,
)
from exactmoe.hf.conversions import (
    DIVISOR,
    GLOBAL_SCALE,
    SCALE,
    linear_converters,
    scale_converters,
)
from exactmoe.hf.saving import Origin
from exactmoe.hf.streaming import without_parameters

NAME = "exactmoe_packed"


@dataclass(frozen=True)
class _Form:
    """Parameters of a stored form: format, dtypes of codes and block scales, global scale."""

    format: str
    codes: torch.dtype
    scales: torch.dtype
    global_scale: str | None = None


# transformers casts what it reads to the parameter's dtype, by value: so bytes need a dtype of
# their own.
_FORMS = {
    "nvfp4": _Form("nvfp4", torch.uint8, torch.float8_e4m3fn, GLOBAL_SCALE),
    "nvfp4-divide": _Form("nvfp4", torch.uint8, torch.float8_e4m3fn, DIVISOR),
    "mxfp4": _Form("mxfp4", torch.int8, torch.float8_e8m0fnu),
    "mxfp4-bytes": _Form("mxfp4", torch.int8, torch.uint8),
    "mxfp4-packed": _Form("mxfp4", torch.uint8, torch.uint8),
    "fp8": _Form("fp8", torch.float8_e4m3fn, torch.float32),
}


@register_quantization_config(NAME)
class PackedConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """How parameters of the decoder's layers are stored, where transformers would not know it.

    Attributes:
        stored: name of a parameter below the decoder's layers ("3.mlp.experts.down_proj",
            "0.mlp.gate_proj.weight", "3.mlp.gate.weight") -> "nvfp4", "nvfp4-divide" (the global
            scale is a divisor), "mxfp4", "mxfp4-bytes" (scales stored as U8), "mxfp4-packed"
            (codes too), "fp8" (128 x 128 blocks), or "f32" (the weight of a
            router that is kept in float32).
        experts: names of experts modules below the decoder's layers ("3.mlp.experts"), which get
            their parameters afterwards (streaming.py).
        linears: FP8 linear layers outside the MLP blocks: name in the checkpoint without its last
            part ("layers.3.attn.wq_a") -> last part of the name of its scales (".scale").
    """

    def __init__(
        self,
        stored: dict[str, str] | None = None,
        linears: dict[str, str] | None = None,
        experts: tuple[str, ...] = (),
        **_: Any,
    ) -> None:
        self.quant_method = NAME
        self.stored = dict(stored or {})
        self.linears = dict(linears or {})
        self.experts = tuple(experts)


@register_quantizer(NAME)
class PackedQuantizer(HfQuantizer):  # type: ignore[misc]
    """Loads a packed checkpoint as it is. Started with `quantization_config=PackedConfig(...)`.

    transformers sees an unquantised checkpoint (`pre_quantized` is False) of which no parameter
    needs quantising. So every tensor is read in the dtype of the parameter that takes it: bytes as
    they are, dense parts as transformers would. (5.17 would load renamed tensors of a pre-quantised
    checkpoint in whatever dtype the file has.)
    """

    # Set by load_model.
    origin: Origin | None = None
    # Name of an experts module -> its parameters, without memory.
    taken: dict[str, dict[str, Tensor]]
    # Name of a linear module -> its name in PackedConfig.linears.
    linears: dict[str, str]

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        layers = decoder_layers(model)
        for name, stored in self.quantization_config.stored.items():
            module, _, parameter = name.rpartition(".")
            _declare(layers.get_submodule(module), parameter, stored)
        self.linears = self._linear_modules(model)
        for module in self.linears:
            _declare(model.get_submodule(module), "weight", "fp8")
        self.taken = {
            name: without_parameters(layers.get_submodule(name))
            for name in self.quantization_config.experts
        }
        self._shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        return model

    def _linear_modules(self, model: Any) -> dict[str, str]:
        """Where transformers puts the FP8 linear layers; those without a place are left out, and
        the load names them.
        """
        if not self.quantization_config.linears:
            return {}
        place_of, state = destinations(model, conversions_of(model)), model.state_dict()
        found = {}
        for base in self.quantization_config.linears:
            name = str(place_of(f"{base}.weight")[0])
            if name in state:
                found[name.removesuffix(".weight")] = base
        return found

    def wrong_shapes(self, model: Any) -> list[str]:
        """What the checkpoint holds in another shape than the model asked for, one line each."""
        return [
            f"{name} is {tuple(tensor.shape)}, the model asks for {self._shapes[name]}"
            for name, tensor in model.state_dict().items()
            if tuple(tensor.shape) != self._shapes[name]
        ]

    def update_weight_conversions(
        self, weight_conversions: list[Any], model: Any = None
    ) -> list[Any]:
        # transformers 5.17 passes no model.
        suffixes = self.quantization_config.linears
        own = linear_converters({m: suffixes[base] for m, base in self.linears.items()})
        return own + scale_converters(weight_conversions) + weight_conversions

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        self._conversions = take_conversions(model)
        return model

    def is_serializable(self) -> bool:
        return True

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
        """What `save_pretrained` writes: the checkpoint's names and bytes."""
        if self.origin is None:
            raise Unsupported("the model was not loaded by load_model; it cannot be saved")
        return self.origin.state_dict(model, self._conversions), {}

    @property
    def is_trainable(self) -> bool:
        return False


def _declare(module: nn.Module, name: str, stored: str) -> None:
    """Replace parameter `name` by the empty parameters (meta) that its stored form needs."""
    shape = tuple(getattr(module, name).shape)
    if stored == "f32":
        _register(module, name, shape, torch.float32)
        return
    *lead, columns = shape
    form, block = _FORMS[stored], BLOCK[_FORMS[stored].format]
    projections = 2 if name == "gate_up_proj" else 1
    if stored == "fp8":
        *experts, rows, _ = shape
        blocks = (projections * -(-rows // projections // block), -(-columns // block))
        _register(module, name, shape, form.codes)
        _register(module, name + SCALE, (*experts, *blocks), form.scales)
        return
    _register(module, name, (*lead, columns // 2), form.codes)
    _register(module, name + SCALE, (*lead, columns // block), form.scales)
    if form.global_scale is not None:
        # A linear layer has one global scale; an experts module one per expert and projection.
        count = (lead[0], projections) if len(lead) == 2 else ()
        _register(module, name + form.global_scale, count, torch.float32)


def _register(module: nn.Module, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    empty = torch.empty(shape, dtype=dtype, device="meta")
    module.register_parameter(name, nn.Parameter(empty, requires_grad=False))
