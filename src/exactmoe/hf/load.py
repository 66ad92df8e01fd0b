"""load_model: a transformers model whose experts stay packed and whose MLP blocks run here."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from exactmoe.checkpoint import Checkpoint, LoadReport, TensorInfo, WeightPlan, audit, plan_layer
from exactmoe.checkpoint.linears import fp8_linears
from exactmoe.config import Limits, Numerics, Placement
from exactmoe.errors import CheckpointError, ConfigError, Unsupported
from exactmoe.hf import adapter, whole_block
from exactmoe.hf.forms import stored_forms
from exactmoe.hf.hub import checkpoint_folder
from exactmoe.hf.linears import attach_linears
from exactmoe.hf.quantizer import PackedConfig
from exactmoe.hf.saving import Origin
from exactmoe.parallel.placement import devices_of

# Rules whose tensors nobody reads. What the other rules cover ("read by transformers") has to find
# its parameter there.
_READ_BY_NOBODY = frozenset({"mtp", "input_scale", "kv_scale"})
_PLAIN = frozenset({"BF16", "F32", "I64", "I32"})
_SHOWN = 10


def load_model(
    path: str | Path,
    *,
    cards: Sequence[str] = ("cpu",),
    numerics: Numerics | str | None = None,
    limits: Limits | None = None,
    backend: str = "auto",
    progress: bool = True,
) -> Any:
    """Load a checkpoint as a transformers model for inference, its MLP blocks run here.

    Args:
        path: a folder, or a hub id.
        cards: device names; the whole model is on the first. Several are all "cpu": the experts of
            each block are cut evenly over them, in the model's own memory.
        numerics: "a16", "a8" or a Numerics (output "bf16"); None: the family's class (glm5_next
            a16, deepseek_v4 a8).
        limits: tokens a piece, checks.
        backend: "auto", or a name of plan.BACKENDS.
        progress: show transformers' progress bars.

    Returns:
        The model in eval mode, no parameter asking for a gradient. Packed weights stay packed: the
        experts' parameters hold the checkpoint's bytes. On backend "cuda" they hold them in the
        order of its kernels; a state dict, saving, copying and moving give the checkpoint's order.

    Raises:
        CheckpointError: a tensor is missing, malformed, or taken by nobody and ignored by no rule.
        ConfigError, Unsupported: a model or a request that cannot run here.
    """
    devices = devices_of(Placement(cards=cards))
    folder = checkpoint_folder(path)
    checkpoint = Checkpoint(folder, numerics)
    report = audit(checkpoint)
    report.require_clean()
    _require_bf16(checkpoint)
    linears = fp8_linears(_left_to_transformers(report))
    _require_plain(report, linears)
    plans = [plan_layer(checkpoint, layer) for layer in range(checkpoint.family.num_layers)]
    suffixes = {base: _scales_suffix(plan) for base, plan in linears.items()}
    packed = PackedConfig(stored_forms(checkpoint, plans), _ignored(report), suffixes)
    with adapter.progress_bars(progress):
        model, info = adapter.from_pretrained(
            str(folder), adapter.read_config(str(folder)), packed, str(devices[0])
        )
    _require_complete(folder, info, model.hf_quantizer.wrong_shapes(model))
    modules = {name: linears[base] for name, base in model.hf_quantizer.linears.items()}
    model.hf_quantizer.origin = Origin(checkpoint, tuple(plans), _unread(report), modules)
    adapter.publish_quantization_config(model, checkpoint.config)
    model.requires_grad_(False)
    options = whole_block.Options(limits, backend, num_cards=len(devices))
    whole_block.attach_all(model, [plan.spec for plan in plans], options)
    attach_linears(model, modules, options)
    return model


def _require_bf16(checkpoint: Checkpoint) -> None:
    """The model's rows are bf16: its config says so, and our blocks give them back so."""
    output = checkpoint.family.numerics.output
    if output != "bf16":
        raise ConfigError(f"numerics.output is {output!r}; a transformers model takes 'bf16'")
    for part in (checkpoint.config, checkpoint.config.get("text_config") or {}):
        dtype = part.get("dtype", part.get("torch_dtype"))
        if dtype not in (None, "bfloat16"):
            config = checkpoint.path / "config.json"
            raise Unsupported(f"{config}: dtype is {dtype!r}; allowed: 'bfloat16'")


def _left_to_transformers(report: LoadReport) -> list[TensorInfo]:
    ignored = report.ignored
    return [entry.info for entry in ignored if entry.rule.name not in _READ_BY_NOBODY]


def _require_plain(report: LoadReport, linears: Mapping[str, WeightPlan]) -> None:
    """What transformers reads must be unquantised, or an FP8 linear layer that runs here: it would
    take a code for the weight.
    """
    ours = {info.name for plan in linears.values() for info in plan.tensors}
    for info in _left_to_transformers(report):
        if info.name not in ours and info.dtype not in _PLAIN:
            allowed = ", ".join(sorted(_PLAIN))
            raise Unsupported(
                f"{info} is left to transformers; allowed there: {allowed}, and linear layers in "
                "FP8 with a scale for each 128 x 128 block"
            )


def _scales_suffix(plan: WeightPlan) -> str:
    return next(part.suffix for part in plan.dialect.parts if part.field == "scales")


def _unread(report: LoadReport) -> frozenset[str]:
    """Names of the tensors that nobody reads."""
    ignored = report.ignored
    return frozenset(entry.info.name for entry in ignored if entry.rule.name in _READ_BY_NOBODY)


def _ignored(report: LoadReport) -> tuple[str, ...]:
    """Patterns of the names that nobody reads, as they are after transformers renamed them."""
    patterns = []
    for entry in report.ignored:
        name = entry.info.name
        if entry.rule.name == "mtp":
            block = re.search(r"(?:layers|mtp)\.\d+\.", name)
            patterns.append(rf"(?:^|\.){re.escape(block[0])}" if block else re.escape(name))
        elif entry.rule.name in _READ_BY_NOBODY:
            patterns.append(rf"\.{re.escape(name.rpartition('.')[2])}$")
    return tuple(dict.fromkeys(patterns))


def _require_complete(folder: Path, info: dict[str, Any], wrong_shapes: list[str]) -> None:
    """Every parameter was in the checkpoint, and every tensor found its parameter."""
    problems = [f"{key} is missing" for key in sorted(info["missing_keys"])]
    problems += [f"{key} is no parameter" for key in sorted(info["unexpected_keys"])]
    problems += [
        f"{key} is {tuple(found)}, the model asks for {tuple(asked)}"
        for key, found, asked in sorted(info["mismatched_keys"])
    ]
    problems += wrong_shapes
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise CheckpointError(
            f"{folder} and the model of transformers disagree: {'; '.join(problems[:_SHOWN])}{more}"
        )
