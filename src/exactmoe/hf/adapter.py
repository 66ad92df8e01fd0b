"""Everything that depends on the insides of transformers, in one place.

Features are probed, never versions. Tried with transformers 5.17 and 5.24; what differs between
them is said at the line.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.activations import ACT2FN
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface
from transformers.integrations.moe import ExpertsInterface
from transformers.quantizers import (
    HfQuantizer,
    register_quantization_config,
    register_quantizer,
)
from transformers.utils import logging
from transformers.utils.quantization_config import QuantizationConfigMixin

from exactmoe.errors import Unsupported


def read_config(folder: str) -> Any:
    """The transformers config of a checkpoint folder, without its quantization_config.

    Ours is passed beside it: a config that keeps one would start the quantizer that its
    quant_method names.
    """
    config = AutoConfig.from_pretrained(folder)
    for part in (config, config.get_text_config()):
        if getattr(part, "quantization_config", None) is not None:
            del part.quantization_config
    return config


def auto_class(config: Any) -> Any:
    """The Auto class that generates text (glm5_next is mapped as image-text-to-text only)."""
    for candidate in (AutoModelForImageTextToText, AutoModelForCausalLM):
        if type(config) in candidate._model_mapping:
            return candidate
    raise Unsupported(f"transformers maps {type(config).__name__} to no class that generates text")


def from_pretrained(
    folder: str, config: Any, quantization: QuantizationConfigMixin, device: str
) -> tuple[Any, dict[str, Any]]:
    """Load a model in bf16 through our quantizer: (model, transformers' loading info)."""
    model, info = auto_class(config).from_pretrained(
        folder,
        config=config,
        quantization_config=quantization,
        dtype=torch.bfloat16,
        device_map={"": device},
        output_loading_info=True,
        # Reported, so that one error names them. (5.17 takes wrong shapes in silence when there is
        # a quantizer: `PackedQuantizer.wrong_shapes` finds them.)
        ignore_mismatched_sizes=True,
    )
    keep_rows_bf16(model)
    return model, info


def keep_rows_bf16(model: nn.Module) -> None:
    """Make every norm give back the dtype that it got.

    DeepSeek-V4 keeps norm weights in float32. Its norm in transformers 5.17 then returns float32
    rows, which the next bf16 linear refuses (stock 5.17 cannot run a bf16 checkpoint of it); 5.24
    casts inside the norm.
    """
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if not type(module).__name__.endswith("RMSNorm") or not isinstance(weight, nn.Parameter):
            continue
        with torch.no_grad():
            probe = module(
                torch.zeros(1, *weight.shape, dtype=torch.bfloat16, device=weight.device)
            )
        if probe.dtype != torch.bfloat16:
            module.register_forward_hook(_output_like_input)


def _output_like_input(
    module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor
) -> torch.Tensor:
    return output.to(inputs[0].dtype)


@contextmanager
def progress_bars(show: bool) -> Iterator[None]:
    """transformers' own progress bars, shown or not for the length of the block."""
    before = logging.is_progress_bar_enabled()
    (logging.enable_progress_bar if show else logging.disable_progress_bar)()
    try:
        yield
    finally:
        (logging.enable_progress_bar if before else logging.disable_progress_bar)()


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The text decoder's layers, in order."""
    layers = getattr(model.get_decoder(), "layers", None)  # type: ignore[operator]
    if not isinstance(layers, nn.ModuleList):
        raise Unsupported(f"{type(model).__name__} has no list of decoder layers")
    return layers


def ignore_unexpected(model: Any, patterns: Iterable[str]) -> None:
    """Leave names that match one of `patterns` out of the report of unexpected tensors."""
    # A class writes a list; an instance holds a set.
    model._keys_to_ignore_on_load_unexpected = {
        *(model._keys_to_ignore_on_load_unexpected or ()),
        *patterns,
    }


def register_experts_function(name: str, function: Callable[..., Any]) -> None:
    """Make `experts_implementation=name` call `function` for both kinds of experts modules.

    It is called with (experts, hidden_states, top_k_index, top_k_weights, **kwargs). A name in only
    one of the two interfaces passes transformers' check and fails at the first call of the other.
    """
    ExpertsInterface.register(name, function)
    FP8ExpertsInterface.register(name, function)


def is_silu(activation: object) -> bool:
    """Whether an activation module of transformers is SiLU."""
    return activation is nn.functional.silu or isinstance(
        activation, (nn.SiLU, type(ACT2FN["silu"]))
    )


def uses_experts_function(module: nn.Module, name: str) -> bool:
    """Whether this is an experts module of transformers whose forward is `name` now."""
    config = getattr(module, "config", None)
    is_experts = hasattr(module, "is_transposed") and hasattr(module, "down_proj")
    return is_experts and getattr(config, "_experts_implementation", None) == name


def converter_of(
    sources: list[str], target: str, operations: list[ConversionOps]
) -> WeightConverter:
    """A converter of tensors called `sources` to one called `target`, anywhere in the model."""
    return WeightConverter(sources, [target], operations)


def copy_converter(
    converter: WeightConverter, sources: list[str], target: str, operations: list[ConversionOps]
) -> WeightConverter:
    """A converter of the same scope with other names. (5.17 has no `WeightConverter.copy`.)"""
    copied = converter_of(sources, target, operations)
    copied.scope_prefix = converter.scope_prefix
    copied.base_model_prefix = converter.base_model_prefix
    return copied


def converter_names(converter: object) -> tuple[list[str], list[str]]:
    """(source names, target names) of a converter as its model wrote them; of a renaming, none."""
    if not isinstance(converter, WeightConverter):
        return [], []
    return list(converter._original_source_patterns), list(converter._original_target_patterns)


__all__ = [
    "ConversionOps",
    "HfQuantizer",
    "QuantizationConfigMixin",
    "auto_class",
    "converter_names",
    "converter_of",
    "copy_converter",
    "decoder_layers",
    "from_pretrained",
    "ignore_unexpected",
    "is_silu",
    "keep_rows_bf16",
    "progress_bars",
    "read_config",
    "register_experts_function",
    "register_quantization_config",
    "register_quantizer",
    "uses_experts_function",
]
