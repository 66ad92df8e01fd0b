"""`from_pretrained(path, quantization_config=ExactMoEConfig("nvfp4"))`: experts packed at load.

For any bfloat16 model whose experts transformers' own decorator made, with the plain gate or that
of one of the two families. Models of the two families run whole MLP blocks, as after `load_model`,
so that quantising, saving and loading again gives the same bits. Of other models the routed experts
run here (`experts_implementation="exactmoe"`); router and shared experts stay with transformers.
`explain` says which.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from exactmoe.checkpoint import Quantization
from exactmoe.config import Numerics
from exactmoe.errors import CheckpointError, ConfigError, Unsupported
from exactmoe.families import MODEL_TYPES, family_of
from exactmoe.formats import BLOCK
from exactmoe.hf import adapter, experts, whole_block
from exactmoe.hf.conversions import scale_converters
from exactmoe.hf.one_by_one import PARAMETERS, QuantizeExperts, QuantizeStacked, Stack, declare
from exactmoe.hf.saving import quantized_state_dict

NAME = "exactmoe"
_SHOWN = 5


@adapter.register_quantization_config(NAME)
class ExactMoEConfig(adapter.QuantizationConfigMixin):  # type: ignore[misc]
    """Quantise the routed experts of a bfloat16 model while it loads.

    Args:
        format: "nvfp4" or "mxfp4".
        rule: how scales are chosen (formats/quantize.py); None: the publisher's.
        numerics: "a16" or "a8"; None: the class of the family (glm5_next a16, deepseek_v4 a8), a16
            for any other model.

    Raises:
        ConfigError: an unknown format, rule or class.
    """

    def __init__(
        self, format: str, rule: str | None = None, numerics: str | None = None, **other: Any
    ) -> None:
        unknown = sorted(set(other) - {"quant_method"})
        if unknown:
            raise ConfigError(f"{', '.join(unknown)} is not known; allowed: format, rule, numerics")
        Quantization(format, rule)
        if numerics is not None:
            Numerics.of(numerics)
        self.quant_method = NAME
        self.format, self.rule, self.numerics = format, rule, numerics


@adapter.register_quantizer(NAME)
class ExactMoEQuantizer(adapter.HfQuantizer):  # type: ignore[misc]
    """Packs experts at load, or loads a checkpoint that such a model saved (`pre_quantized`)."""

    def __init__(self, quantization_config: ExactMoEConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._replaced: list[tuple[Any, Any]] = []
        self._published: list[Any] = []
        self._problems: list[str] = []

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        if dtype != torch.bfloat16:
            raise Unsupported(f"dtype is {dtype}; allowed: torch.bfloat16 (pass dtype='bfloat16')")
        return dtype

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        for name, module in _expert_modules(model):
            experts.require_known(module)
            adapter.never_initialize(module)
            setattr(module, experts.NUMERICS, self.quantization_config.numerics)
            for parameter in PARAMETERS:
                shape = tuple(getattr(module, parameter).shape)
                block = BLOCK[self.quantization_config.format]
                if shape[-1] % block:
                    raise Unsupported(
                        f"{name}.{parameter} has {shape[-1]} inputs; "
                        f"{self.quantization_config.format} needs a multiple of {block}"
                    )
                self._shapes[f"{name}.{parameter}"] = shape
                declare(module, parameter, self.quantization_config.format, self.pre_quantized)
        if not self._shapes:
            raise Unsupported(
                f"{type(model).__name__} has no experts module of transformers' "
                "use_experts_implementation; nothing here could be quantised"
            )
        return model

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        return not self.pre_quantized and param_name in self._shapes

    def param_element_size(self, model: Any, param_name: str, param: Tensor) -> float:
        if self.param_needs_quantization(model, param_name):
            return 0.5  # its scales are parameters of their own
        return param.element_size()

    def get_quantize_ops(self) -> QuantizeStacked:
        return QuantizeStacked(self)

    def update_weight_conversions(
        self, weight_conversions: list[Any], model: Any = None
    ) -> list[Any]:
        if self.pre_quantized:
            self._replaced = [(c, c) for c in weight_conversions]
            return scale_converters(weight_conversions) + weight_conversions
        self._replaced = [(c, self._replacement(c)) for c in weight_conversions]
        return [replacement for _, replacement in self._replaced]

    def _replacement(self, conversion: Any) -> Any:
        _, targets = adapter.converter_names(conversion)
        if targets and targets[0].endswith(PARAMETERS) and adapter.only_stacks(conversion):
            return adapter.lazy_converter(conversion, [QuantizeExperts(self)])
        return conversion

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        adapter.take_conversions(model)
        self._published = [c for c, replacement in self._replaced if replacement.was_used()]
        self._replaced = []
        self._require_packed(model)
        model.requires_grad_(False)
        adapter.keep_rows_bf16(model)
        if model.config.model_type in MODEL_TYPES:
            family = family_of(model.config.to_dict(), None, self.quantization_config.numerics)
            whole_block.attach_all(model, family.layers, whole_block.Options())
        else:
            for _, module in _expert_modules(model):
                adapter.use_experts_function(module, experts.NAME)
        return model

    def _require_packed(self, model: Any) -> None:
        """transformers would only warn where tensors were missing, and draw random values."""
        loaded = adapter.loaded_names(model)
        for name, shape in self._shapes.items():
            codes = model.get_parameter(name)
            if name not in loaded or tuple(codes.shape) != (*shape[:-1], shape[-1] // 2):
                self._problems.append(f"{name} is missing or incomplete")
        if self._problems:
            more = f"; and {len(self._problems) - _SHOWN} more" * (len(self._problems) > _SHOWN)
            raise CheckpointError(f"{'; '.join(self._problems[:_SHOWN])}{more}")

    @contextmanager
    def problem(self, where: str) -> Iterator[None]:
        """Keeps a refusal until all is read: transformers would log it and raise an error of its
        own that does not say why.
        """
        try:
            yield
        except (ConfigError, Unsupported) as error:
            self._problems.append(f"{where}: {error}")

    def stack(self, shape: tuple[int, ...], projections: int) -> Stack:
        """An empty stack of packed experts in this quantizer's format."""
        config = self.quantization_config
        return Stack(shape, projections, config.format, config.rule)

    def is_serializable(self) -> bool:
        return True

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
        """What `save_pretrained` writes, by transformers' names.

        NVFP4 experts as ModelOpt stores them (`weight`, `weight_scale`, `weight_scale_2`), MXFP4
        ones as DeepSeek-V4 does (`weight`, `scale`); where the model stores its experts stacked,
        `_scale` and `_scale_2` beside them.
        """
        packed = list(self._shapes)
        return quantized_state_dict(model, self._published, packed), {}

    @property
    def is_trainable(self) -> bool:
        return False


def _expert_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, m) for name, m in model.named_modules() if adapter.is_experts(m)]
