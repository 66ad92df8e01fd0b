"""Planning one layer from headers alone: routed experts, router, shared expert or dense MLP."""

from exactmoe.checkpoint.header import TensorInfo
from exactmoe.checkpoint.index import Checkpoint
from exactmoe.checkpoint.plan import Finding, LayerPlan
from exactmoe.checkpoint.projections import expert_plans, size, weight_plan
from exactmoe.families import PROJECTIONS


def plan_layer(checkpoint: Checkpoint, layer: int) -> LayerPlan:
    """The plan of one layer; ConfigError when the model has no such layer."""
    spec = checkpoint.family.layer(layer)
    plan = LayerPlan(spec)
    if spec.moe is not None:
        expert_plans(checkpoint, plan, spec.moe.num_experts)
        _router(checkpoint, plan)
    for name in PROJECTIONS:
        if spec.shared_size is not None:
            base, inner, what = spec.names.shared(name), spec.shared_size, "shared expert"
        else:
            base, inner, what = spec.names.dense(name), spec.intermediate_size, "dense MLP"
        shape = size(name, inner, spec.hidden_size)
        plan.dense[name] = weight_plan(checkpoint, plan, what, [base], shape)
    _unexpected(checkpoint, plan)
    return plan


def _unexpected(checkpoint: Checkpoint, plan: LayerPlan) -> None:
    """Finds what is neither consumed nor ignored: it could change what the block means."""
    seen = {info.name for info, _ in plan.consumed()} | {error.tensor for error in plan.errors}
    for name in checkpoint.names_under(f"{plan.spec.names.block}."):
        if name not in seen and checkpoint.family.ignored_by(name, plan.spec) is None:
            plan.errors.append(unexpected(checkpoint.tensors[name]))


def unexpected(info: TensorInfo) -> Finding:
    """The finding for a tensor that belongs to nothing."""
    return Finding(info.name, f"{info} is unexpected: no part and no ignore rule claims it", info)


def _router(checkpoint: Checkpoint, plan: LayerPlan) -> None:
    names, moe = plan.spec.names, plan.spec.moe
    if moe is None:
        return
    vocab_size = plan.spec.vocab_size or 0
    wanted = {
        "weight": (names.router_weight, ("BF16", "F32"), (moe.num_experts, moe.hidden_size)),
        "bias": (names.router_bias, ("F32", "BF16"), (moe.num_experts,)),
        "table": (names.router_table, ("I64",), (vocab_size, moe.top_k)),
    }
    for part, (name, dtypes, shape) in wanted.items():
        if name is None:
            continue
        info = checkpoint.tensors.get(name)
        if info is None:
            plan.missing(name, f"{checkpoint.path}: {name} is missing (router {part})")
        elif plan.expect(info, dtypes, [shape]):
            plan.router[part] = info
    bias = plan.router.get("bias")
    if bias is not None and bias.dtype != "F32":
        plan.notes.append(
            f"{bias}: upcast exactly; published selection biases are F32, so this one was rounded"
        )
