"""Everything that depends on the insides of transformers, in one place.

Features are probed, never versions. Tried with transformers 5.17 and 5.24; what differs between
them is said at the line.
"""

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
)
from transformers.activations import ACT2FN
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface
from transformers.integrations.moe import ExpertsInterface
from transformers.modeling_utils import remove_tied_weights_from_state_dict
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


def publish_quantization_config(model: Any, published: dict[str, Any]) -> None:
    """Give the model's config the quantization_config of config.json, so that it is saved again.

    (DeepSeek-V4's config class of transformers 5.24 adds a field to it.)
    """
    text = published.get("text_config") or published
    for part, source in ((model.config.get_text_config(), text), (model.config, published)):
        if "quantization_config" in source:
            part.quantization_config = copy.deepcopy(source["quantization_config"])
        elif hasattr(part, "quantization_config"):
            del part.quantization_config


def auto_class(config: Any) -> Any:
    """The Auto class that generates text (glm5_next is mapped as image-text-to-text only)."""
    for candidate in (AutoModelForImageTextToText, AutoModelForCausalLM):
        if type(config) in candidate._model_mapping:
            return candidate
    raise Unsupported(f"transformers maps {type(config).__name__} to no class that generates text")


def from_pretrained(
    folder: Path,
    tensors: Mapping[str, Any],
    config: Any,
    quantization: QuantizationConfigMixin,
    device: str,
) -> tuple[Any, dict[str, Any]]:
    """Load a model in bf16 through our quantizer: (model, transformers' loading info).

    tensors: by the names of the checkpoint in `folder`; `[...]` reads one. All others are no
    business of transformers.
    """
    model_class = auto_class(config)._model_mapping[type(config)]
    model, info = model_class.from_pretrained(
        None,
        state_dict=dict(tensors),
        config=config,
        quantization_config=quantization,
        dtype=torch.bfloat16,
        device_map={"": device},
        output_loading_info=True,
        # Reported, so that one error names them. (5.17 takes wrong shapes in silence when there is
        # a quantizer: `PackedQuantizer.wrong_shapes` finds them.)
        ignore_mismatched_sizes=True,
    )
    _name_after(model, folder)
    keep_rows_bf16(model)
    return model, info


def _name_after(model: Any, folder: Path) -> None:
    """What transformers takes from a folder beside the tensors."""
    model.config.name_or_path = model.name_or_path = str(folder)
    if not model.can_generate():
        return
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
        return
    model.generation_config = GenerationConfig.from_pretrained(
        folder, config_file_name="config.json", _from_model_config=True
    )


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


def register_experts_function(name: str, function: Callable[..., Any]) -> None:
    """Make `experts_implementation=name` call `function` for both kinds of experts modules.

    It is called with (experts, hidden_states, top_k_index, top_k_weights, **kwargs). A name in only
    one of the two interfaces passes transformers' check and fails at the first call of the other.
    """
    ExpertsInterface.register(name, function)
    FP8ExpertsInterface.register(name, function)


def register_expert_parallel(name: str, implementation: type) -> None:
    """Make `DistributedConfig(ep_implementation=name)` call `implementation(experts, ep_mesh,
    tp_mesh)` for each experts module. (5.17 has no such registry.)
    """
    if find_spec("transformers.distributed.expert_parallel") is not None:
        found = import_module("transformers.distributed.expert_parallel")
        found.EPImplementationInterface.register(name, implementation)


def is_silu(activation: object) -> bool:
    """Whether an activation module of transformers is SiLU."""
    return activation is nn.functional.silu or isinstance(
        activation, (nn.SiLU, type(ACT2FN["silu"]))
    )


def uses_experts_function(module: nn.Module, name: str) -> bool:
    """Whether this is an experts module of transformers whose forward is `name` now."""
    config = getattr(module, "config", None)
    return is_experts(module) and getattr(config, "_experts_implementation", None) == name


def use_experts_function(module: nn.Module, name: str) -> None:
    """Let the forward of an experts module be `name`."""
    module.config._experts_implementation = name  # type: ignore[union-attr]


def is_experts(module: nn.Module) -> bool:
    """Whether transformers' decorator for experts classes made this module, whatever the model."""
    return hasattr(module, "is_transposed") and hasattr(module, "down_proj")


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


class LazyConverter(WeightConverter):  # type: ignore[misc]
    """A converter whose operations get functions that read the tensors, so that one at a time is
    in memory. For loads without threads, as those that quantise.
    """

    __slots__ = ()

    def materialize_tensors(self) -> dict[str, list[Any]]:
        collected = dict(self.collected_tensors)
        self.collected_tensors.clear()
        return collected


def lazy_converter(converter: WeightConverter, operations: list[ConversionOps]) -> LazyConverter:
    """A converter of the same names and scope that reads when its operations ask."""
    sources, targets = converter_names(converter)
    lazy = LazyConverter(sources, targets, operations)
    lazy.scope_prefix = converter.scope_prefix
    lazy.base_model_prefix = converter.base_model_prefix
    return lazy


def only_stacks(converter: object) -> bool:
    """Whether a converter stacks experts [N, K] to [E, N, K] and puts projections below each other:
    nothing that would change what a row holds.
    """
    if not isinstance(converter, WeightConverter):
        return False
    stack, *rest = converter.operations
    if not isinstance(stack, MergeModulelist) or stack.dim != 0:
        return False
    return not rest or (len(rest) == 1 and isinstance(rest[0], Concatenate) and rest[0].dim == 1)


def take_conversions(model: Any) -> list[Any]:
    """The conversions that the load used, taken from the model: saving then renames nothing."""
    used, model._weight_conversions = model._weight_conversions, []
    return used  # type: ignore[no-any-return]


def never_initialize(module: nn.Module) -> None:
    """Keep transformers from drawing random values where a checkpoint lacks tensors of a module."""
    module._is_hf_initialized = True  # type: ignore[assignment]


def loaded_names(model: nn.Module) -> set[str]:
    """Names of the parameters that came from the checkpoint; transformers marks them."""
    return {n for n, p in model.named_parameters() if getattr(p, "_is_hf_initialized", False)}


def without_ties(model: Any) -> dict[str, torch.Tensor]:
    """The model's state dict with each tied weight once, under the name that loading expects."""
    return remove_tied_weights_from_state_dict(model.state_dict(), model)  # type: ignore[no-any-return]


def revert(
    model: Any, state: dict[str, torch.Tensor], conversions: list[Any]
) -> dict[str, torch.Tensor]:
    """Tensors by their names in the model -> as transformers saves them.

    Conversions without a way back are left out: they load what a caller saves by itself.
    """
    conversions = [conversion for conversion in conversions if _has_reverse(conversion)]
    kept = model._weight_conversions
    # It goes through them backwards. 5.17 ends no pattern at a name's border, so the longest
    # target has to come first; renamings keep their order.
    model._weight_conversions = sorted(
        conversions, key=lambda c: max(map(len, _targets(c)), default=0)
    )
    try:
        return revert_weight_conversion(model, state)  # type: ignore[no-any-return]
    finally:
        model._weight_conversions = kept


def _has_reverse(conversion: object) -> bool:
    operations = getattr(conversion, "operations", [])
    return not any(type(op).reverse_op is ConversionOps.reverse_op for op in operations)


def _targets(conversion: object) -> list[str]:
    return converter_names(conversion)[1]


def conversions_of(model: Any) -> list[Any]:
    """transformers' own conversions of a model's checkpoints, before any quantizer adds some."""
    return get_model_conversion_mapping(model, None, None)  # type: ignore[no-any-return]


def destinations(model: Any, conversions: list[Any]) -> Callable[[str], tuple[Any, ...]]:
    """Where a load puts a tensor, as a function of its name: equal for two names of one tensor.

    The numbers of the name are a part of it: experts that are stacked share a parameter.
    """
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    state, prefix = model.state_dict(), model.base_model_prefix

    def place(name: str) -> tuple[Any, ...]:
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if renamed not in state and name in state:
            renamed, pattern = rename_source_key(name, [], [], prefix, state)
        return renamed, pattern, tuple(re.findall(r"\d+", name))

    return place


def converter_names(converter: object) -> tuple[list[str], list[str]]:
    """(source names, target names) of a converter as its model wrote them; of a renaming, none."""
    if not isinstance(converter, WeightConverter):
        return [], []
    return list(converter._original_source_patterns), list(converter._original_target_patterns)


__all__ = [
    "ConversionOps",
    "HfQuantizer",
    "QuantizationConfigMixin",
    "LazyConverter",
    "auto_class",
    "conversions_of",
    "converter_names",
    "converter_of",
    "copy_converter",
    "decoder_layers",
    "destinations",
    "from_pretrained",
    "is_experts",
    "is_silu",
    "keep_rows_bf16",
    "lazy_converter",
    "loaded_names",
    "never_initialize",
    "only_stacks",
    "progress_bars",
    "publish_quantization_config",
    "read_config",
    "register_expert_parallel",
    "register_experts_function",
    "register_quantization_config",
    "register_quantizer",
    "revert",
    "take_conversions",
    "use_experts_function",
    "uses_experts_function",
    "without_ties",
]
