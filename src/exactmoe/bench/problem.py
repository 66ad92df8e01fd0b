"""What is computed in a benchmark: random packed weights, and random selections of experts.

Weights are drawn as bytes on the device; no unquantised original exists, so 288 experts take the
4 GB of their codes and scales and nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exactmoe.bank import ExpertBank, Router
from exactmoe.bench.shapes import Shape
from exactmoe.dense import DenseMLP
from exactmoe.formats import BLOCK, PackedWeight

# E4M3 bytes 2 ... 15; with the global scale below a projection keeps the size of its input.
_E4M3_RANGE = (0x40, 0x58)
# E8M0 exponents around log2(1 / (3 sqrt(K))), four binades.
_E8M0_SPAN = 4


@dataclass(frozen=True, eq=False)
class Problem:
    """The routed experts of one block: gate and up [E, I, H], down [E, H, I], canonical bytes.

    gate and up of an expert have one global scale, as in ModelOpt's checkpoints: some peers hold
    them as one matrix.
    """

    shape: Shape
    format: str
    gate: PackedWeight
    up: PackedWeight
    down: PackedWeight

    @property
    def device(self) -> torch.device:
        return self.gate.device

    @property
    def expert_bytes(self) -> float:
        """Bytes of one expert: codes, block scales and global scales."""
        nbytes = self.gate.nbytes + self.up.nbytes + self.down.nbytes
        return nbytes / self.shape.num_experts

    def bank(self) -> ExpertBank:
        """The experts as a layer holds them. A copy where a path may reorder them in place."""
        parts = (self.gate, self.up, self.down)
        if self.device.type == "cuda":
            parts = tuple(_copied(part) for part in parts)  # type: ignore[assignment]
        return ExpertBank(*parts)

    def as_format(self, format: str, generator: torch.Generator) -> "Problem":
        """The same codes (the same memory) under the scales of another format."""
        if format == self.format:
            return self
        return _with_scales(
            self.shape, format, [w.codes for w in (self.gate, self.up, self.down)], generator
        )


def draw_problem(
    shape: Shape, format: str, device: torch.device, generator: torch.Generator
) -> Problem:
    """Random experts of a shape; `generator` is on `device`."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    codes = [
        torch.randint(
            0,
            256,
            (shape.num_experts, rows, columns // 2),
            dtype=torch.uint8,
            device=device,
            generator=generator,
        )
        for rows, columns in ((inner, hidden), (inner, hidden), (hidden, inner))
    ]
    return _with_scales(shape, format, codes, generator)


def _with_scales(
    shape: Shape, format: str, codes: Sequence[Tensor], generator: torch.Generator
) -> Problem:
    device = codes[0].device
    gate_up_factor, down_factor = (
        0.75 + 0.5 * torch.rand(shape.num_experts, device=device, generator=generator)
        for _ in range(2)
    )
    weights = []
    for part, factor in zip(codes, (gate_up_factor, gate_up_factor, down_factor), strict=True):
        columns = part.shape[2] * 2
        scale_shape = (*part.shape[:2], columns // BLOCK[format])
        low, high = _E4M3_RANGE
        if format == "mxfp4":
            low = 127 - round(torch.log2(torch.tensor(3 * columns**0.5)).item()) - _E8M0_SPAN // 2
            high = low + _E8M0_SPAN
        scales = torch.randint(
            low, high, scale_shape, dtype=torch.uint8, device=device, generator=generator
        )
        global_scale = factor / (16 * columns**0.5) if format == "nvfp4" else None
        weights.append(PackedWeight(format, part, scales, global_scale))
    return Problem(shape, format, *weights)


def _copied(weight: PackedWeight) -> PackedWeight:
    scales = None if weight.scales is None else weight.scales.clone()
    return PackedWeight(weight.format, weight.codes.clone(), scales, weight.global_scale)


@dataclass(frozen=True, eq=False)
class Selection:
    """T tokens and the experts that serve them.

    Attributes:
        x: bfloat16 [T, H].
        expert_ids: int32 [T, K], distinct in a row, uniform.
        weights: float32 [T, K], of sum 1 in a row.
    """

    x: Tensor
    expert_ids: Tensor
    weights: Tensor

    @property
    def num_tokens(self) -> int:
        return self.x.shape[0]

    def first(self, tokens: int) -> "Selection":
        """The first tokens, contiguous."""
        return Selection(self.x[:tokens], self.expert_ids[:tokens], self.weights[:tokens])

    def distinct_experts(self) -> int:
        """U: how many experts' weights a call must read."""
        return int(self.expert_ids.unique().numel())


def draw_selections(
    shape: Shape, tokens: int, count: int, device: torch.device, generator: torch.Generator
) -> list[Selection]:
    """`count` fresh selections of `tokens` tokens each."""
    selections = []
    for _ in range(count):
        x = torch.randn(tokens, shape.hidden_size, device=device, generator=generator)
        scores = torch.rand(tokens, shape.num_experts, device=device, generator=generator)
        weights, ids = scores.topk(shape.top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        selections.append(Selection(x.bfloat16(), ids.int().contiguous(), weights.contiguous()))
    return selections


def draw_router(shape: Shape, device: torch.device, generator: torch.Generator) -> Router:
    """A router whose choices are near uniform."""
    size = (shape.num_experts, shape.hidden_size)
    weight = torch.randn(size, device=device, generator=generator) / shape.hidden_size**0.5
    bias = torch.zeros(shape.num_experts, device=device)
    return Router(weight.bfloat16(), bias, config=shape.router)


def draw_dense(
    shape: Shape, size: int, device: torch.device, generator: torch.Generator, backend: str
) -> DenseMLP:
    """A bfloat16 MLP of intermediate size `size`."""
    hidden = shape.hidden_size
    gate, up, down = (
        (torch.randn(rows, columns, device=device, generator=generator) / columns**0.5).bfloat16()
        for rows, columns in ((size, hidden), (size, hidden), (hidden, size))
    )
    return DenseMLP(gate, up, down, shape.swiglu_limit, backend=backend)
