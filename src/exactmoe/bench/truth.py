"""Errors: the relative distance of some rows from float64 arithmetic on the packed weights."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exactmoe.bench.problem import Problem, Selection
from exactmoe.dense import DenseMLP
from exactmoe.formats import PackedWeight, dequantize
from exactmoe.formats.scales import decode_e4m3
from exactmoe.formats.units import PIECE
from exactmoe.reference.quantize import quantize

SAMPLED_ROWS = 2


@dataclass(frozen=True, eq=False)
class Truth:
    """Some rows of a call in float64.

    Attributes:
        rows: which.
        values: float64 [rows, H].
    """

    rows: tuple[int, ...]
    values: Tensor

    def error(self, y: Tensor) -> float:
        """Relative L2 distance of y [T, H] in these rows; NaN where a row was not written."""
        found = y[list(self.rows)].double()
        return float((found - self.values).norm() / self.values.norm())


def sampled_rows(tokens: int) -> tuple[int, ...]:
    """The first and the last row."""
    return tuple(sorted({0, tokens - 1}))[:SAMPLED_ROWS]


def true_weight(weight: PackedWeight, expert: int) -> Tensor:
    """One expert's weights, float64 [N, K]."""
    part = slice(expert, expert + 1)
    scales, factors = (
        None if tensor is None else tensor[part] for tensor in (weight.scales, weight.global_scale)
    )
    single = PackedWeight(
        weight.format, weight.codes[part], scales, factors, weight.global_scale_op
    )
    return dequantize(single)[0]


def _mlp(x: Tensor, weights: Sequence[Tensor], limit: float | None) -> Tensor:
    return weights[2] @ _h(x, weights, limit)


def _h(x: Tensor, weights: Sequence[Tensor], limit: float | None) -> Tensor:
    gate, up = weights[0] @ x, weights[1] @ x
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(gate) * up


def _quantized(values: Tensor) -> Tensor:
    """Values [K] as e4m3 codes and scales hold them, float64."""
    codes, scales = quantize(values[None].cpu())
    decoded = decode_e4m3(codes).double().view(-1, PIECE) * scales.double().view(-1, 1)
    return decoded.view(-1).to(values.device)


def experts_truth(problem: Problem, selection: Selection, quantized: bool = False) -> Truth:
    """The routed experts, in the sampled rows of a selection.

    quantized: from x and h (with its routing weight) as class `a8` holds them (contract section 3).
    """
    rows, limit = sampled_rows(selection.num_tokens), problem.shape.swiglu_limit
    values = torch.zeros(
        len(rows), problem.shape.hidden_size, dtype=torch.float64, device=problem.device
    )
    for place, row in enumerate(rows):
        x = _quantized(selection.x[row]) if quantized else selection.x[row].double()
        ids, weights = selection.expert_ids[row].tolist(), selection.weights[row].double()
        for expert, weight in zip(ids, weights, strict=True):
            parts = [true_weight(w, expert) for w in (problem.gate, problem.up, problem.down)]
            if quantized:
                h = _h(x, parts, limit) * weight
                values[place] += parts[2] @ _quantized(h.float())
            else:
                values[place] += weight * _mlp(x, parts, limit)
    return Truth(rows, values)


def dense_truth(layer: DenseMLP, x: Tensor) -> Truth:
    """A dense MLP, in the sampled rows of x [T, H]."""
    rows, bank = sampled_rows(x.shape[0]), layer.bank
    parts = [true_weight(w, 0) for w in (bank.gate, bank.up, bank.down)]
    return Truth(rows, torch.stack([_mlp(x[r].double(), parts, layer.swiglu_limit) for r in rows]))
