"""Router: logits, scores, selection, weights (contract section 6)."""

from collections.abc import Callable

import torch
from torch import Tensor

from exactmoe.config import Numerics, RouterConfig
from exactmoe.reference.dot import dot_router
from exactmoe.reference.functions import canonical, f32, sigmoid_score, sqrt_softplus_score, to_bf16


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """x bfloat16 [T, H], weight bfloat16 or float32 [E, H] -> logits float32 [T, E]."""
    return dot_router(weight.float(), x.float())


def select(
    logits: Tensor, bias: Tensor | None, top_k: int, config: RouterConfig, numerics: Numerics
) -> tuple[Tensor, Tensor]:
    """Logits float32 [T, E] -> expert_ids int32 [T, K], scores without bias float32 [T, K].

    Larger key first; equal keys (-0 = +0): lower id; NaN keys last, by lower id. Ids of a row are
    distinct.
    """
    ladder = _ladder(numerics)
    scores = ladder(_score(logits, config))
    keys = scores if bias is None else ladder(scores + bias)
    expert_ids = logits.new_empty((logits.shape[0], top_k), dtype=torch.int32)
    for token, row in enumerate(keys.tolist()):
        order = sorted(
            range(len(row)),
            key=lambda e: (row[e] != row[e], -row[e] if row[e] == row[e] else 0.0, e),
        )
        expert_ids[token] = expert_ids.new_tensor(order[:top_k])
    return expert_ids, scores.gather(1, expert_ids.long())


def routing_weights(scores: Tensor, config: RouterConfig, numerics: Numerics) -> Tensor:
    """Selected scores float32 [T, K], in selection (or table) order -> weights float32 [T, K].

    (s / (sum + 1e-20)) x factor, the sum from +0 in that order; without `normalize`: s x factor.
    """
    ladder = _ladder(numerics)
    weights = scores
    if config.normalize:
        total = scores.new_zeros(scores.shape[0])
        for k in range(scores.shape[1]):
            total = ladder(total + scores[:, k])
        weights = ladder(scores / (total + f32(1e-20))[:, None])
    return canonical(ladder(weights * f32(config.factor)))


def router(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    config: RouterConfig,
    top_k: int,
    numerics: Numerics,
) -> tuple[Tensor, Tensor]:
    """Score layers: x bfloat16 [T, H] -> expert_ids int32 [T, K], weights float32 [T, K]."""
    expert_ids, scores = select(router_logits(x, weight), bias, top_k, config, numerics)
    return expert_ids, routing_weights(scores, config, numerics)


def hash_router(
    x: Tensor,
    weight: Tensor,
    table: Tensor,
    token_ids: Tensor,
    config: RouterConfig,
    numerics: Numerics,
) -> tuple[Tensor, Tensor]:
    """Hash layers: ids from table [V, K] by token id [T]; weights from the scores of those experts,
    in table order.
    """
    expert_ids, scores = look_up(router_logits(x, weight), table, token_ids, config, numerics)
    return expert_ids, routing_weights(scores, config, numerics)


def look_up(
    logits: Tensor, table: Tensor, token_ids: Tensor, config: RouterConfig, numerics: Numerics
) -> tuple[Tensor, Tensor]:
    """Logits float32 [T, E] -> expert_ids int32 [T, K] of the tokens' table rows, their scores."""
    expert_ids = table[token_ids.long()].int()
    scores = _ladder(numerics)(_score(logits, config))
    return expert_ids, scores.gather(1, expert_ids.long())


def _score(logits: Tensor, config: RouterConfig) -> Tensor:
    return sigmoid_score(logits) if config.score == "sigmoid" else sqrt_softplus_score(logits)


def _ladder(numerics: Numerics) -> Callable[[Tensor], Tensor]:
    """Identity, or the rounding to bf16 after score, key, running sum and weight that
    `router="bf16_ladder"` asks for.
    """
    if numerics.router == "bf16_ladder":
        return lambda values: to_bf16(values).float()
    return lambda values: values
