"""Quantising BF16 experts while they are read: the originals are never resident together."""

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from exactmoe.checkpoint.plan import LayerPlan, WeightPlan
from exactmoe.checkpoint.reader import Reader
from exactmoe.errors import CheckpointError, ConfigError, Unsupported
from exactmoe.formats import BLOCK, PackedWeight, quantize
from exactmoe.formats.quantize import MXFP4_RULES, NVFP4_RULES
from exactmoe.runtime.free_memory import allocate

_RULES = {"nvfp4": NVFP4_RULES, "mxfp4": MXFP4_RULES}
# Each worker holds one original and its float32 copies; torch also splits each expert by itself.
MAX_WORKERS = 4


@dataclass(frozen=True)
class Quantization:
    """How BF16 experts are quantised at load.

    Attributes:
        format: "nvfp4" or "mxfp4".
        rule: how scales are chosen (formats/quantize.py); None: the publisher's.

    Raises:
        ConfigError: an unknown format or rule.
    """

    format: str
    rule: str | None = None

    def __post_init__(self) -> None:
        if self.format not in _RULES:
            raise ConfigError(f"quantize is {self.format!r}; allowed: {', '.join(_RULES)}, None")
        rules = _RULES[self.format]
        if self.rule is not None and self.rule not in rules:
            raise ConfigError(f"rule is {self.rule!r}; allowed: {', '.join(rules)}")

    @classmethod
    def of(cls, value: "str | Quantization") -> "Quantization":
        """A format by name, or the given Quantization."""
        return value if isinstance(value, Quantization) else cls(value)


def require_bf16_experts(plan: LayerPlan, quantization: Quantization) -> None:
    """Raises ConfigError unless the layer has routed experts and all of them are BF16."""
    asked = f"quantize is {quantization.format!r}, but layer {plan.spec.layer}"
    if not plan.experts:
        raise ConfigError(f"{asked} has no routed experts; allowed: None")
    for name, weight in plan.experts.items():
        if weight.dialect.format != "bf16":
            raise ConfigError(f"{asked} stores {name} as {weight.dialect.name}; allowed: None")


def read_quantized(
    reader: Reader,
    plan: WeightPlan,
    quantization: Quantization,
    experts: Sequence[int] | None = None,
    device: torch.device | None = None,
) -> PackedWeight:
    """Experts of a BF16 projection (None: all), quantised one by one on several threads.

    The packed weight is on `device`; None: the host.

    The bytes are those of quantising all experts at once: each expert stands alone. At most
    MAX_WORKERS originals are in memory at any time.

    Raises:
        CheckpointError: a value that is not finite; names file, tensor, expert, row and column.
        Unsupported: K is not a multiple of the format's block.
    """
    experts = range(len(plan.sources)) if experts is None else experts
    device = device or torch.device("cpu")
    format, count = quantization.format, len(experts)
    rows, columns = plan.rows, plan.columns

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return allocate((count, *shape), dtype, device, f"{plan.what} as {format}")

    codes = empty(torch.uint8, rows, columns // 2)
    scales = empty(torch.uint8, rows, columns // BLOCK[format])
    global_scale = empty(torch.float32) if format == "nvfp4" else None

    def quantize_one(place: int) -> None:
        expert = experts[place]
        source = plan.sources[expert]
        stored = source.parts[source.dialect.parts[0]]
        original = torch.empty((1, rows, columns), dtype=torch.bfloat16)
        reader.copy(stored, original[0])
        try:
            packed = quantize(original, format, quantization.rule)
        except ConfigError as error:
            message = re.sub(r"\bexpert 0\b", f"expert {expert}", str(error))
            raise CheckpointError(f"{stored}: {message}") from error
        except Unsupported as error:
            raise Unsupported(f"{stored}: {error}") from error
        codes[place] = packed.codes[0]
        if packed.scales is not None:
            scales[place] = packed.scales[0]
        if global_scale is not None and packed.global_scale is not None:
            global_scale[place] = packed.global_scale[0]

    workers = ThreadPoolExecutor(min(MAX_WORKERS, torch.get_num_threads(), count))
    try:
        for _ in workers.map(quantize_one, range(count)):
            pass
    finally:
        workers.shutdown(cancel_futures=True)
    return PackedWeight(format, codes, scales, global_scale)
