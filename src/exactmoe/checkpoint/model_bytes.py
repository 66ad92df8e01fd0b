"""What a model takes in memory: from the headers of its files, or from its config.json alone."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exactmoe.checkpoint.audit import LoadReport, audit
from exactmoe.checkpoint.index import Checkpoint
from exactmoe.checkpoint.plan import LayerPlan
from exactmoe.checkpoint.planner import plan_layer
from exactmoe.config import Numerics
from exactmoe.errors import CheckpointError, ConfigError
from exactmoe.families import MTP_RULE, PROJECTIONS, LayerSpec, family_of
from exactmoe.formats import BLOCK

_BF16_BYTES, _F32_BYTES, _I64_BYTES = 2, 4, 8


@dataclass(frozen=True)
class LayerBytes:
    """One MLP block.

    Attributes:
        spec: the layer.
        expert_bytes: of one routed expert; 0 in a dense layer.
        dense_bytes: of the dense MLP, or of the shared expert.
        router_bytes: weight, selection bias and hash table.
    """

    spec: LayerSpec
    expert_bytes: int
    dense_bytes: int
    router_bytes: int

    @property
    def num_experts(self) -> int:
        """Routed experts; 0 in a dense layer."""
        return 0 if self.spec.moe is None else self.spec.moe.num_experts


@dataclass(frozen=True)
class ModelBytes:
    """A model.

    Attributes:
        name: its path.
        model_type: as config.json names it.
        source: what the bytes were taken from.
        format: of the routed experts.
        layers: every MLP block, multi-token prediction layers left out as a load leaves them out.
        other_bytes: everything that is no MLP (attention, embeddings, norms), as it is stored;
            None: a config does not say.
    """

    name: str
    model_type: str
    source: str
    format: str
    layers: tuple[LayerBytes, ...]
    other_bytes: int | None

    @property
    def routed_bytes(self) -> int:
        """Of all routed experts of all layers."""
        return sum(layer.num_experts * layer.expert_bytes for layer in self.layers)

    @property
    def mlp_bytes(self) -> int:
        """Dense MLPs, shared experts and routers: what is not cut over cards."""
        return sum(layer.dense_bytes + layer.router_bytes for layer in self.layers)


def packed_bytes(format: str, rows: int, columns: int) -> int:
    """Bytes of one PackedWeight of one expert, N = rows, K = columns.

    Raises:
        ConfigError: no format has that name.
    """
    values = rows * columns
    if format == "nvfp4":
        return values // 2 + values // BLOCK["nvfp4"] + _F32_BYTES
    if format == "mxfp4":
        return values // 2 + values // BLOCK["mxfp4"]
    if format == "fp8":
        block = BLOCK["fp8"]
        return values + _F32_BYTES * -(-rows // block) * -(-columns // block)
    if format == "bf16":
        return values * _BF16_BYTES
    raise ConfigError(f"format is {format!r}; allowed: {', '.join(BLOCK)}")


def swiglu_bytes(formats: Mapping[str, str], hidden_size: int, intermediate_size: int) -> int:
    """gate, up and down of one expert or dense MLP; `formats` is by projection."""
    shapes = {
        "gate": (intermediate_size, hidden_size),
        "up": (intermediate_size, hidden_size),
        "down": (hidden_size, intermediate_size),
    }
    return sum(packed_bytes(formats[name], *shapes[name]) for name in PROJECTIONS)


def of_checkpoint(
    path: str | Path, numerics: Numerics | str | None = None, format: str | None = None
) -> ModelBytes:
    """From the headers of a checkpoint's files. format: of routed experts that are quantised at
    load; None: as stored.

    Raises:
        CheckpointError, ConfigError, Unsupported: the checkpoint could not be loaded.
    """
    checkpoint = Checkpoint(path, numerics)
    report = audit(checkpoint)
    report.require_clean()
    plans = [plan_layer(checkpoint, layer) for layer in range(checkpoint.family.num_layers)]
    return of_plans(report, plans, format)


def of_plans(
    report: LoadReport, plans: Sequence[LayerPlan], format: str | None = None
) -> ModelBytes:
    """From what is known of a checkpoint already: its report, and the plans of its layers."""
    stored = dict.fromkeys(w.dialect.format for plan in plans for w in plan.experts.values())
    ignored = (entry for entry in report.ignored if entry.rule.name != MTP_RULE)
    return ModelBytes(
        name=report.path,
        model_type=report.model_type,
        source="headers of its files",
        format=format or ", ".join(stored),
        layers=tuple(_of_plan(plan, format) for plan in plans),
        other_bytes=sum(entry.info.nbytes for entry in ignored),
    )


def of_layer(path: str, plan: LayerPlan) -> ModelBytes:
    """One layer of a checkpoint as if it were all of a model."""
    return ModelBytes(
        name=f"{path}, layer {plan.spec.layer}",
        model_type="",
        source="headers of its files",
        format="",
        layers=(_of_plan(plan, None),),
        other_bytes=0,
    )


def _of_plan(plan: LayerPlan, format: str | None) -> LayerBytes:
    spec, size = plan.spec, plan.spec.intermediate_size
    routed = {name: format or weight.dialect.format for name, weight in plan.experts.items()}
    dense = {name: weight.dialect.format for name, weight in plan.dense.items()}
    return LayerBytes(
        spec=spec,
        expert_bytes=swiglu_bytes(routed, spec.hidden_size, size) if routed else 0,
        dense_bytes=swiglu_bytes(dense, spec.hidden_size, spec.shared_size or size),
        router_bytes=sum(info.nbytes for info in plan.router.values()),
    )


def of_config(
    path: str | Path, numerics: Numerics | str | None = None, format: str | None = None
) -> ModelBytes:
    """From a config.json alone. format: of the routed experts; None: what its
    quantization_config says. Dense parts are bf16, or fp8 where the config says so.

    Raises:
        CheckpointError: the file cannot be read.
        ConfigError: it names no format that is known here, and none was given.
        Unsupported: nothing here runs that model.
    """
    config = _read(Path(path))
    family = family_of(config, numerics=numerics)
    dense = dict.fromkeys(PROJECTIONS, _dense_format(config))
    chosen = format or _expert_format(config)
    routed = dict.fromkeys(PROJECTIONS, chosen)
    return ModelBytes(
        name=str(path),
        model_type=family.model_type,
        source="config.json alone",
        format=chosen,
        layers=tuple(_of_spec(spec, routed, dense) for spec in family.layers),
        other_bytes=None,
    )


def _of_spec(spec: LayerSpec, routed: dict[str, str], dense: dict[str, str]) -> LayerBytes:
    hidden, size, router = spec.hidden_size, spec.intermediate_size, 0
    if spec.moe is not None:
        router = spec.moe.num_experts * hidden * _BF16_BYTES
        if spec.names.router_bias is not None:
            router += spec.moe.num_experts * _F32_BYTES
        if spec.names.router_table is not None:
            router += (spec.vocab_size or 0) * spec.moe.top_k * _I64_BYTES
    return LayerBytes(
        spec=spec,
        expert_bytes=0 if spec.moe is None else swiglu_bytes(routed, hidden, size),
        dense_bytes=swiglu_bytes(dense, hidden, spec.shared_size or size),
        router_bytes=router,
    )


def _quantization(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config") or {}
    return config.get("quantization_config") or text.get("quantization_config") or {}


def _dense_format(config: Mapping[str, Any]) -> str:
    return "fp8" if _quantization(config).get("quant_method") == "fp8" else "bf16"


def _expert_format(config: Mapping[str, Any]) -> str:
    """As published checkpoints say it (docs of the dialects in checkpoint/dialects)."""
    asked = _quantization(config)
    method = asked.get("quant_method")
    if not asked:
        return "bf16"
    if method == "modelopt" and asked.get("quant_algo") == "NVFP4":
        return "nvfp4"
    if method == "compressed-tensors" and asked.get("format") == "nvfp4-pack-quantized":
        return "nvfp4"
    if method == "fp8" and asked.get("moe_quant_algo") == "NVFP4":
        return "nvfp4"
    if method == "fp8":
        return "mxfp4" if config.get("expert_dtype") == "fp4" else "fp8"
    if method == "exactmoe" and asked.get("format") in BLOCK:
        return str(asked["format"])
    raise ConfigError(
        f"quantization_config has quant_method {method!r} and does not say how experts are "
        f"stored; allowed: --format with one of {', '.join(BLOCK)}"
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}; allowed: an object")
    return content
