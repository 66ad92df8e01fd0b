"""A faster form of GLM-5-Next's chunked linear attention, for training only.

transformers' reference walks row by row through each chunk: thousands of tiny launches a step. Here
the same triangular system is solved by one call. Mathematically equal; the sums run in another
order.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers.models.glm5_next import modeling_glm5_next

CHUNK = 32


def unit(x: Tensor) -> Tensor:
    """`x` with rows of length 1 (epsilon 1e-6 under the root, as in transformers)."""
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def solved_chunks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: None,
    output_final_state: bool,
    **options: object,
) -> tuple[Tensor, None]:
    """`chunk_kimi_delta_attention` without a cache: same arguments and result.

    query, key, value and g are (B, S, heads, dim), beta is (B, S, heads), the result as value.
    Raises ValueError for a cache, or where S is not a multiple of CHUNK.
    """
    if initial_state is not None or output_final_state or query.shape[1] % CHUNK:
        raise ValueError(
            f"training form: needs no cache and a multiple of {CHUNK} tokens, got {query.shape[1]}"
        )
    with torch.autocast(query.device.type, enabled=False):
        return solve(query, key, value, g, beta).to(query.dtype), None


def solve(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The attention itself, in f32; result (B, S, heads, dim)."""
    query, key, value, g, beta = (
        x.transpose(1, 2).float() for x in (query, key, value, g, beta[..., None])
    )
    query, key = unit(query) * query.shape[-1] ** -0.5, unit(key)
    batch, heads, tokens, dim = key.shape
    query, key, value, g, beta = (
        x.reshape(batch, heads, tokens // CHUNK, CHUNK, x.shape[-1])
        for x in (query, key, value, g, beta)
    )
    g = g.cumsum(-2)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=key.device).triu(1)
    decay = (g.unsqueeze(-2) - g.unsqueeze(-3)).masked_fill(later[..., None], float("-inf")).exp()
    # Row i of both products sees key j decayed from j to i: one small matmul per row.
    pairs = torch.stack((key * beta, query), -2) @ (key.unsqueeze(-3) * decay).transpose(-1, -2)
    system, attention = pairs[..., 0, :].tril(-1), pairs[..., 1, :]
    solved = torch.linalg.solve_triangular(
        system + torch.eye(CHUNK, device=key.device),
        torch.cat((value, key * g.exp()), -1) * beta,
        upper=False,
        unitriangular=True,
    )
    value, key_decayed = solved.split((value.shape[-1], dim), -1)
    query_decayed = query * g.exp()
    key_to_end = (key * (g[..., -1:, :] - g).exp()).transpose(-1, -2)
    end_decay = g[..., -1, :].exp().unsqueeze(-1)
    state = torch.zeros(batch, heads, dim, value.shape[-1], device=key.device)
    outputs = []
    for chunk in range(tokens // CHUNK):
        new = value[:, :, chunk] - key_decayed[:, :, chunk] @ state
        outputs.append(query_decayed[:, :, chunk] @ state + attention[:, :, chunk] @ new)
        state = state * end_decay[:, :, chunk] + key_to_end[:, :, chunk] @ new
    return torch.cat(outputs, 2).transpose(1, 2)


@contextmanager
def solved_linear_attention() -> Iterator[None]:
    """Use `solved_chunks` in GLM-5-Next's layers inside this context."""
    stock = modeling_glm5_next.chunk_kimi_delta_attention
    modeling_glm5_next.chunk_kimi_delta_attention = solved_chunks
    try:
        yield
    finally:
        modeling_glm5_next.chunk_kimi_delta_attention = stock
