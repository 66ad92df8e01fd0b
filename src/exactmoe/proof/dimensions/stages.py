"""Stages: every op of a GPU's path against the reference, and its dots against float64."""

import torch
from torch import Tensor

from exactmoe import ops, reference
from exactmoe.dense import DenseMLP
from exactmoe.formats import PackedWeight
from exactmoe.formats.rows import Rows
from exactmoe.formats.scales import decode_e4m3
from exactmoe.layer import MoELayer
from exactmoe.proof import stages as stage
from exactmoe.proof.backends import gpu_order, path_for_canonical, wide_twin
from exactmoe.proof.batch import Batch, Entry
from exactmoe.proof.numbers import bells
from exactmoe.proof.trial import Trial
from exactmoe.reference.functions import canonical, swiglu32, to_bf16

_STREAM = 110
_TOKENS = 64


def stages(trial: Trial) -> None:
    """The ops one by one from their own inputs; then the layer's result from those stages.

    The fast path has no canonical bytes and joins stages, so the ops are the portable path's; the
    layer's own result must be the one of their stages.
    On the CPU the dimension "backend" compares whole results with the reference instead.
    """
    layer = trial.entry.layer
    if not gpu_order(layer):
        trial.cannot_run("stages", "whole results are compared with the reference byte by byte")
        return
    x = bells((_TOKENS, trial.entry.hidden_size), trial.stream(_STREAM), layer.device).bfloat16()
    if isinstance(layer, DenseMLP):
        _dense(trial, layer, x)
    elif trial.entry.name == "experts":
        _experts(trial, layer, x)
    else:
        _block(trial, layer, x)


def _experts(trial: Trial, layer: MoELayer, x: Tensor) -> None:
    """The first and the last expert: route table, activation, rounding, combine; three dots."""
    numerics, limit = layer.numerics, layer.config.swiglu_limit
    chosen = sorted({0, layer.config.num_experts - 1})[: layer.config.top_k]
    bank = [stage.experts_of(w, chosen) for w in (layer.bank.gate, layer.bank.up, layer.bank.down)]
    local = torch.arange(len(chosen), dtype=torch.int32, device=x.device).expand(len(x), -1)
    factors = trial.random(len(x), _STREAM + 1).weights
    assert factors is not None
    factors = factors[:, : len(chosen)].contiguous()
    routed = local.contiguous(), factors
    path = ops.path(path_for_canonical(layer))
    found = stage.run_slots(path, (bank[0], bank[1], bank[2]), x, routed, numerics, limit)

    _same(trial, "route table", _expected_order(routed[0], len(chosen)), found.routes.slots)
    if numerics.activation == "a8":
        _same_rows(trial, "codes of x", x, found.x)
        _same_rows(trial, "codes of h", found.raw_h, found.h)
    _same(trial, "h", stage.expected_h(found, limit, factors, numerics), found.raw_h)
    _same(trial, "slots", stage.expected_slots(found, numerics), found.slots)
    spread = found.x.values.shape[0], len(chosen)
    for place, name in enumerate(("gate", "up", "down")):
        rows = found.h if name == "down" else found.x
        for number in range(len(chosen)):
            picked = _rows_of(rows, number, None if name != "down" else spread[1])
            result = getattr(found, name)[number :: spread[1]]
            _measure(trial, f"{name} dot", (bank[place], number), picked, result)

    if layer.plan().path not in ("cuda", "cuda_a8_bf16", path.name):
        return  # on the fp8 units the layer's own dots have other bits than these stages
    ids = torch.full((len(x), layer.config.top_k), -1, dtype=torch.int32, device=x.device)
    weights = torch.zeros(len(x), layer.config.top_k, device=x.device)
    ids[:, : len(chosen)] = torch.tensor(chosen, device=x.device)
    weights[:, : len(chosen)] = factors
    y = layer.experts(x, ids, weights)
    shape = (*ids.shape, found.slots.shape[1])
    slots = torch.zeros(shape, dtype=torch.float32, device=x.device)
    slots[:, : len(chosen)] = found.slots.float().view(len(x), len(chosen), -1)
    total = stage.combined(
        slots.view(-1, shape[2]), (ids, weights), layer.config.num_experts, numerics.activation
    )
    _same(trial, "y of the stages", reference.finish(total, None, numerics.output), y)


def _block(trial: Trial, layer: MoELayer, x: Tensor) -> None:
    """Router from its own logits; the block from its router, experts and shared expert."""
    router, numerics, config = layer.router, layer.numerics, layer.config
    assert router is not None
    token_ids = trial.random(len(x), _STREAM + 1).token_ids
    path = ops.path(path_for_canonical(layer))
    store, device = path.storage, x.device
    logits = torch.empty(len(x), config.num_experts, device=device)
    ids = torch.empty(len(x), config.top_k, dtype=torch.int32, device=device)
    weights = torch.empty(len(x), config.top_k, device=device)
    parts = None
    if len(x) <= store.router_parts:
        parts = torch.empty(16, len(x), config.num_experts, device=device)
    wide_ids = None if token_ids is None else token_ids.long()
    path.router(x.to(store.x), router, wide_ids, numerics, logits, (ids, weights), parts)
    own = logits.cpu()
    if router.table is None:
        bias = None if router.bias is None else router.bias.cpu()
        expected, scores = reference.select(own, bias, config.top_k, router.config, numerics)
    else:
        assert token_ids is not None
        expected, scores = reference.look_up(
            own, router.table.cpu(), token_ids.cpu(), router.config, numerics
        )
    _same(trial, "expert ids", expected, ids)
    _same(trial, "weights", reference.routing_weights(scores, router.config, numerics), weights)
    for name, one, other in zip(
        ("ids of route()", "weights of route()"),
        (ids, weights),
        layer.route(x, token_ids),
        strict=True,
    ):
        _same(trial, name, one, other)
    true, size = x.double() @ router.weight_f32.double().T, x.double().abs()
    found = stage.errors(logits, true, size @ router.weight_f32.double().abs().T)
    for name, error, allowed in zip(
        ("relative L2", "of the magnitudes"),
        found,
        stage.bounds(x.shape[1], stage.A16),
        strict=True,
    ):
        trial.measure(f"router dot, {name}", error, allowed)

    routed = Batch(x, expert_ids=ids, weights=weights)
    total = Entry("experts", wide_twin(layer))(routed)
    shared = None
    if layer.shared is not None:
        shared = Entry("dense", wide_twin(layer.shared))(Batch(x)).cpu()
    y = reference.finish(total.cpu(), shared, numerics.output)
    _same(trial, "y of the parts", y, layer(x, token_ids=token_ids))


def _dense(trial: Trial, layer: DenseMLP, x: Tensor) -> None:
    """h from its own g and u, y from its own sum, three dots."""
    path = ops.path(path_for_canonical(layer))
    gate, up, down = (layer.bank.gate, layer.bank.up, layer.bank.down)
    h = torch.empty(len(x), layer.intermediate_size, dtype=path.storage.h, device=x.device)
    out = torch.empty(len(x), layer.hidden_size, device=x.device)
    prepared = tuple(path.prepare(w) for w in (gate, up, down))
    path.dense_mlp(
        x.to(path.storage.x), (prepared[0], prepared[1], prepared[2]), layer.swiglu_limit, h, out
    )
    g, u = (stage.project(path, w, x) for w in (gate, up))
    for name, weight, result in (("gate", gate, g), ("up", up, u)):
        _measure(trial, f"dense {name} dot", (weight, 0), Rows(x, None), result)
    _same(trial, "h", to_bf16(swiglu32(g.cpu(), u.cpu(), layer.swiglu_limit)), h)
    _measure(trial, "dense down dot", (down, 0), Rows(h, None), out)
    own = canonical(out.cpu())
    y = to_bf16(own) if layer.numerics.output == "bf16" else own
    _same(trial, "y of its sum", y, layer(x))


def _same(trial: Trial, case: str, expected: Tensor, found: Tensor) -> None:
    wide = expected if expected.ndim > 1 else expected[:, None]
    shown = found.cpu() if found.ndim > 1 else found.cpu()[:, None]
    trial.compare("stages", case, wide.cpu().to(shown.dtype), shown)


def _same_rows(trial: Trial, case: str, values: Tensor, found: Rows) -> None:
    """`a8` rows by the reference: codes (as bytes, or decoded as the path keeps them), scales."""
    codes, scales = reference.quantize(values.float().cpu())
    assert found.scales is not None
    if found.values.dtype == torch.float8_e4m3fn:
        _same(trial, case, codes, found.values.view(torch.uint8))
    else:
        _same(trial, case, decode_e4m3(codes), found.values)
    _same(trial, f"{case}: scales", scales, found.scales)


def _expected_order(ids: Tensor, experts: int) -> Tensor:
    return torch.argsort(ids.flatten().cpu(), stable=True)


def _rows_of(rows: Rows, number: int, step: int | None) -> Rows:
    """The rows that expert `number` read: all of x, or its own slots of h."""
    if step is None:
        return rows
    raw = rows.values
    if raw.dtype == torch.float8_e4m3fn:
        values = raw.view(torch.uint8)[number::step].contiguous().view(raw.dtype)
    else:
        values = raw[number::step]
    return Rows(values, None if rows.scales is None else rows.scales[number::step])


def _measure(
    trial: Trial, name: str, weight: tuple[PackedWeight, int], rows: Rows, found: Tensor
) -> None:
    true, magnitude = stage.true_dot(*weight, rows)
    numerics = trial.entry.layer.numerics
    allowed = stage.bounds(weight[0].columns, stage.A16 if rows.scales is None else numerics)
    for kind, error, bound in zip(
        ("relative L2", "of the magnitudes"),
        stage.errors(found, true, magnitude),
        allowed,
        strict=True,
    ):
        trial.measure(f"{name}, {kind}", error, bound)
