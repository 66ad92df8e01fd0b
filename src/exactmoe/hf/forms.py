"""Which parameters take the tensors of a checkpoint: the stored form of every MLP weight."""

from collections.abc import Sequence

import torch

from exactmoe.checkpoint import Checkpoint, LayerPlan, Reader, WeightPlan
from exactmoe.errors import CheckpointError, Unsupported


def stored_forms(checkpoint: Checkpoint, plans: Sequence[LayerPlan]) -> dict[str, str]:
    """PackedConfig.stored: how each parameter of the MLP blocks lies in the files.

    Raises:
        CheckpointError: gate and up in two layouts, or float32 scales that are no powers of two.
        Unsupported: a layout that no parameter can hold, though `load_layer` can read it.
    """
    stored = {}
    for plan in plans:
        block = f"{plan.spec.layer}.mlp"
        if plan.experts:
            gate, up = (plan.experts[name].dialect for name in ("gate", "up"))
            if gate is not up:
                raise CheckpointError(
                    f"layer {plan.spec.layer}: the experts' gate is {gate.name}, their up is "
                    f"{up.name}; allowed: one layout for both"
                )
            stored[f"{block}.experts.gate_up_proj"] = _form(
                plan.experts["gate"], plan.experts["up"]
            )
            stored[f"{block}.experts.down_proj"] = _form(plan.experts["down"])
            block += ".shared_experts"
        with Reader(checkpoint) as reader:
            for weight in (*plan.experts.values(), *plan.dense.values()):
                _require_powers_of_two(reader, weight)
        for name, weight in plan.dense.items():
            stored[f"{block}.{name}_proj.weight"] = _form(weight)
        if plan.router and plan.router["weight"].dtype == "F32":
            stored[f"{plan.spec.layer}.mlp.gate.weight"] = "f32"
    return {name: format for name, format in stored.items() if format != "bf16"}


def _form(*weights: WeightPlan) -> str:
    """Stored form of the projections that one parameter holds, as PackedConfig names it."""
    dialect = weights[0].dialect
    parts = {part.field: part for part in dialect.parts}
    if dialect.format == "mxfp4":
        scales = [source.parts[parts["scales"]] for w in weights for source in w.sources]
        dtypes = sorted({stored.info.dtype for stored in scales})
        if "U8" in dtypes and len(dtypes) > 1:
            raise Unsupported(
                f"{scales[0].info} and beside it: E8M0 scales are {' and '.join(dtypes)}; "
                "allowed in a whole model: one dtype, or F32 and F8_E8M0"
            )
        if parts["codes"].dtypes == ("U8",):
            return "mxfp4-packed"
        return "mxfp4-bytes" if dtypes == ["U8"] else "mxfp4"
    if dialect.format == "nvfp4":
        stored = weights[0].sources[0].parts[parts["global_scale"]]
        if len(stored.index) == 1:
            raise Unsupported(f"{stored.info}: allowed in a whole model: [E, 2] or [E, 1]")
        return "nvfp4-divide" if dialect.global_scale_op == "divide" else "nvfp4"
    return dialect.format


def _require_powers_of_two(reader: Reader, weight: WeightPlan) -> None:
    """transformers casts float32 scales to E8M0 by value: exact for powers of two, else rounded."""
    for part in weight.dialect.parts if weight.dialect.format == "mxfp4" else ():
        shape = part.shape(weight.rows, weight.columns)
        for source in weight.sources:
            if source.parts[part].info.dtype == "F32":
                reader.copy(source.parts[part], torch.empty(shape, dtype=torch.uint8))
