"""router: logits, scores, selection, weights (contract section 6)."""

import numpy as np

from exactmoe.kernels.cpu.compile import device, kernel_jit
from exactmoe.kernels.cpu.dot import ROWS
from exactmoe.kernels.cpu.functions import canonical, round_bf16, sigmoid_score, sqrt_softplus_score
from exactmoe.kernels.cpu.intrinsics import call_tile, next_piece
from exactmoe.kernels.cpu.project import ONE

SEGMENTS = 16
LANES = 16
EXPERTS = 32  # experts of one piece of the logits
_TINY, _ZERO = np.float32(1e-20), np.float32(0.0)


@device
def _rounded(value, ladder):
    return round_bf16(value) if ladder else value


@kernel_jit
def logits(x, weight, tile_1, tile_4, out, counter):
    """x float32 [T, H], weight float32 [E, H], addresses of the f32 tiles -> out float32 [T, E]."""
    num_tokens, columns = x.shape
    num_experts = weight.shape[0]
    num_blocks = -(-num_experts // EXPERTS)
    per_segment = -(-columns // (SEGMENTS * LANES)) * LANES
    rows = np.empty(ROWS, np.int64)
    tokens = np.empty(8, np.int64)
    geometry = np.zeros(3, np.int64)
    tokens[4:] = ONE.ctypes.data
    sums = np.empty((SEGMENTS, 4 * ROWS), np.float32)
    while True:
        block = next_piece(counter)
        if block >= num_blocks:
            break
        last = min((block + 1) * EXPERTS, num_experts) - 1
        for token in range(0, num_tokens, 4):
            single = num_tokens - token == 1
            for quad in range(block * EXPERTS, last + 1, ROWS):
                sums[:] = _ZERO
                for segment in range(SEGMENTS):
                    start = segment * per_segment
                    length = min(per_segment, columns - start)
                    if length <= 0:
                        break
                    for r in range(ROWS):
                        rows[r] = weight.ctypes.data + 4 * (min(quad + r, last) * columns + start)
                    for t in range(4):
                        tokens[t] = x.ctypes.data + 4 * (
                            min(token + t, num_tokens - 1) * columns + start
                        )
                    geometry[0] = length
                    geometry[1] = length
                    call_tile(
                        tile_1 if single else tile_4,
                        rows.ctypes.data,
                        rows.ctypes.data,
                        rows.ctypes.data,
                        tokens.ctypes.data,
                        tokens.ctypes.data + 32,
                        geometry.ctypes.data,
                        sums[segment].ctypes.data,
                    )
                step = 1
                while step < SEGMENTS:
                    for segment in range(0, SEGMENTS, 2 * step):
                        for cell in range(4 * ROWS):
                            sums[segment, cell] = sums[segment, cell] + sums[segment + step, cell]
                    step *= 2
                for t in range(min(4, num_tokens - token)):
                    for r in range(min(ROWS, last + 1 - quad)):
                        out[token + t, quad + r] = sums[0, t * ROWS + r]


@device
def _better(key, best):
    """Whether a key comes before the best so far, which has a lower id; NaN comes last."""
    return key > best or (best != best and key == key)


@kernel_jit
def select(
    logits, bias, table, token_ids, sigmoid, factor, normalize, ladder, expert_ids, weights, counter
):
    """logits float32 [T, E], bias float32 [E] or [0], table int64 [V, K] or [0, K] with token_ids
    int64 [T] or [0].

    expert_ids int32 [T, K] and weights float32 [T, K] are written. A token id that is no row of the
    table, or an id in it that no expert has, gives id E and weight 0: absent, and the route table
    reports it. A caller checks both first; another thread may write them meanwhile.
    """
    num_tokens, num_experts = logits.shape
    top_k = expert_ids.shape[1]
    scores = np.empty(num_experts, np.float32)
    keys = np.empty(num_experts, np.float32)
    taken = np.empty(num_experts, np.bool_)
    while True:
        token = next_piece(counter)
        if token >= num_tokens:
            break
        for e in range(num_experts):
            logit = logits[token, e]
            score = sigmoid_score(logit) if sigmoid else sqrt_softplus_score(logit)
            scores[e] = _rounded(score, ladder)
            keys[e] = _rounded(scores[e] + bias[e], ladder) if bias.shape[0] else scores[e]
            taken[e] = False
        total = _ZERO
        for k in range(top_k):
            if table.shape[0]:
                row = token_ids[token]
                best = table[row, k] if 0 <= row < table.shape[0] else np.int64(-1)
                if best < 0 or best >= num_experts:
                    expert_ids[token, k] = num_experts
                    continue
            else:
                best = np.int64(-1)
                for e in range(num_experts):
                    if not taken[e] and (best < 0 or _better(keys[e], keys[best])):
                        best = np.int64(e)
                taken[best] = True
            expert_ids[token, k] = best
            total = _rounded(total + scores[best], ladder)
        for k in range(top_k):
            if expert_ids[token, k] == num_experts:
                weights[token, k] = _ZERO
                continue
            weight = scores[expert_ids[token, k]]
            if normalize:
                weight = _rounded(weight / (total + _TINY), ladder)
            weights[token, k] = canonical(_rounded(weight * factor, ladder))
