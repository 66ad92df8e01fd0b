"""torch's grouped matrix product over bfloat16 copies of the experts."""

import torch
import torch.nn.functional as F
from torch import Tensor

from exactmoe.bench.peers.peer import WeightedSum, fused_swiglu, sorted_by_expert
from exactmoe.bench.problem import Problem, Selection
from exactmoe.bench.timing import Call
from exactmoe.bench.truth import true_weight
from exactmoe.errors import Unsupported


class GroupedMM:
    """Calls over one copy of the weights."""

    def __init__(self, problem: Problem, widths: tuple[int, ...]) -> None:
        shape, device = problem.shape, problem.device
        needed = 2 * 3 * shape.hidden_size * shape.intermediate_size * shape.num_experts
        if device.type == "cuda" and needed * 1.1 > torch.cuda.mem_get_info(device)[0]:
            raise Unsupported(f"bfloat16 copies take {needed / 1e9:.1f} GB; less is free")
        self._problem, self._sum = problem, WeightedSum(problem)
        self._gate_up = torch.empty(
            shape.num_experts,
            2 * shape.intermediate_size,
            shape.hidden_size,
            dtype=torch.bfloat16,
            device=device,
        )
        self._down = torch.empty(
            shape.num_experts,
            shape.hidden_size,
            shape.intermediate_size,
            dtype=torch.bfloat16,
            device=device,
        )
        for expert in range(shape.num_experts):
            parts = [true_weight(weight, expert) for weight in (problem.gate, problem.up)]
            self._gate_up[expert].copy_(torch.cat(parts))
            self._down[expert].copy_(true_weight(problem.down, expert))
        self._swiglu = fused_swiglu(device.type)

    def __call__(self, selection: Selection) -> Call:
        """Gather, product, SwiGLU, product, back to the slots' order, weighted sum."""
        shape, y = self._problem.shape, torch.empty_like(selection.x)
        order, counts = sorted_by_expert(selection, shape.num_experts)
        tokens, back = order // shape.top_k, order.argsort()
        ends = counts.cumsum(0).int()
        gate_up, down = self._gate_up.transpose(1, 2), self._down.transpose(1, 2)

        def call() -> Tensor:
            rows = selection.x.index_select(0, tokens)
            h = self._swiglu(F.grouped_mm(rows, gate_up, offs=ends), shape.swiglu_limit)
            slots = F.grouped_mm(h, down, offs=ends).index_select(0, back)
            return self._sum(slots, selection, y)

        return call
