"""humming-kernels: W4A16 and W4A8 kernels for routed experts, through its public HummingLayer.

As vLLM runs it: gate and up are one matrix, the tuning is what its own heuristics say for the
number of slots, its process_input kernel does the clamped SwiGLU (and the fp8 activations of down
in the same launch). Each of the two products gets a sort for its own tile height, made before.
"""

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from exactmoe.bench.peers.peer import WeightedSum, sorted_by_expert
from exactmoe.bench.problem import Problem, Selection
from exactmoe.bench.timing import Call
from exactmoe.errors import ConfigError, Unsupported
from exactmoe.formats import PackedWeight

_WEIGHTS = {
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "nvfp4"},
    "mxfp4": {"quant_method": "mxfp4"},
}
_EVERY_SIZE = 1 << 30


@dataclass(frozen=True)
class Form:
    """How humming is called.

    Attributes:
        fp8: activations in e4m3 with a scale per 128; else bfloat16.
        batch_invariant: its mode in which a row's bits do not depend on the batch.
        gemm_type: "indexed" (vLLM's choice: rows are gathered by the kernel) or
            "grouped_contiguous" (rows are sorted in memory before, which is timed).
    """

    fp8: bool = False
    batch_invariant: bool = False
    gemm_type: str = "indexed"


class Humming:
    """Calls over one copy of the weights in humming's layout."""

    def __init__(self, form: Form, problem: Problem, widths: tuple[int, ...]) -> None:
        _require_card(problem.device)
        self._form, self._problem = form, problem
        self._sum = WeightedSum(problem)
        slots = [width * problem.shape.top_k for width in widths]
        self._gate_up = Product(form, [problem.gate, problem.up], slots)
        self._down = Product(form, [problem.down], slots)
        with ThreadPoolExecutor() as pool:
            list(pool.map(Product.compile, (self._gate_up, self._down)))
        limit = f"{problem.shape.swiglu_limit}f"
        gate = f"fminf(a, {limit})"
        self._swiglu = f"{gate} / (1.0f + __expf(-{gate})) * fminf(fmaxf(b, -{limit}), {limit})"
        rows = max(slots)
        shape, device = problem.shape, problem.device
        self._h2 = torch.empty(
            rows, 2 * shape.intermediate_size, dtype=torch.bfloat16, device=device
        )
        self._slots = torch.empty(rows, shape.hidden_size, dtype=torch.bfloat16, device=device)

    def __call__(self, selection: Selection) -> Call:
        """Product, SwiGLU, product, weighted sum."""
        if self._form.gemm_type == "indexed":
            return self._indexed(selection)
        return self._grouped(selection)

    def _indexed(self, selection: Selection) -> Call:
        top_k, slots = self._problem.shape.top_k, selection.expert_ids.numel()
        first, second = (
            blocks_of(selection, self._problem.shape.num_experts, product.tile_rows(slots))
            for product in (self._gate_up, self._down)
        )
        h2, out, y = self._h2[:slots], self._slots[:slots], torch.empty_like(selection.x)

        def call() -> Tensor:
            self._gate_up(selection.x, h2, slots, top_k=top_k, **first)
            h, scales = self._activated(h2)
            self._down(h, out, slots, input_scale=scales, top_k=1, **second)
            return self._sum(out, selection, y)

        return call

    def _grouped(self, selection: Selection) -> Call:
        shape, slots = self._problem.shape, selection.expert_ids.numel()
        order, counts = sorted_by_expert(selection, shape.num_experts)
        tokens, back = order // shape.top_k, order.argsort()
        layout = {"expert_layout": torch.nn.functional.pad(counts.cumsum(0), (1, 0))}
        h2, out, y = self._h2[:slots], self._slots[:slots], torch.empty_like(selection.x)

        def call() -> Tensor:
            self._gate_up(selection.x.index_select(0, tokens), h2, slots, **layout)
            h, scales = self._activated(h2)
            self._down(h, out, slots, input_scale=scales, **layout)
            return self._sum(out.index_select(0, back), selection, y)

        return call

    def _activated(self, h2: Tensor) -> tuple[Tensor, Tensor | None]:
        """[S, 2 I] -> the input of down, and its scales with fp8 activations."""
        h, scales, _ = _module("layer").HummingMethod.may_process_input(
            self._down.layer, h2, activation_type="binary_split", activation_impl=self._swiglu
        )
        return h, scales


def _require_card(device: torch.device) -> None:
    if device.type != "cuda":
        raise Unsupported(f"humming needs an NVIDIA card; this is {device}")


def _module(name: str) -> Any:
    """A module of humming, which may not be installed."""
    return import_module(f"humming.{name}")


class Product:
    """One of the two products: weights in humming's layout and its tuning."""

    def __init__(self, form: Form, weights: Sequence[PackedWeight], slots: Sequence[int]) -> None:
        device, first = weights[0].device, weights[0]
        with torch.device(device):
            self.layer = _module("layer").HummingLayer(
                shape_n=sum(weight.rows for weight in weights),
                shape_k=first.columns,
                weight_config=dict(_WEIGHTS[first.format]),
                input_config={"dtype": "float8e4m3", "group_size": 128} if form.fp8 else None,
                num_experts=first.num_experts,
                torch_dtype=torch.bfloat16,
            )
        self.layer.load_from_tensors(stacked(weights))
        self.layer.transform()
        self._compute = json.dumps(
            {
                "use_batch_invariant": form.batch_invariant,
                "use_f16_accum": False,
                "gemm_type": form.gemm_type,
            }
        )
        # Only what will be asked for is compiled, not all of humming's intervals.
        configs = {
            count: _module("tune").get_heuristics_config(
                self.layer.humming_config,
                shape_m=count,
                use_batch_invariant=form.batch_invariant,
                gemm_type=form.gemm_type,
                device=device,
            )
            for count in slots
        }
        self._intervals = intervals(configs)
        self._tuning = json.dumps(self._intervals)

    def compile(self) -> None:
        """All kernels at once, on all cores; the calls find them."""
        config, device = self.layer.humming_config.to_str(), self.layer.weight.device
        kernel = _module("kernel.humming").HummingKernel
        kernel.prepare_kernels(config, self._compute, self._tuning, device)

    def tile_rows(self, slots: int) -> int:
        """Rows of a tile for a call of `slots` slots."""
        for low, high, config in self._intervals:
            if low < slots <= high:
                return int(config["block_shape"][0])
        raise ConfigError(f"slots are {slots}; allowed: a positive number")

    def __call__(self, x: Tensor, out: Tensor, slots: int, **routing: Any) -> None:
        """x [rows, K] -> out [slots, N]."""
        self.layer(
            inputs=x,
            outputs=out,
            valid_shape_m=slots,
            compute_config=self._compute,
            tuning_config=self._tuning,
            **routing,
        )


def intervals(configs: Mapping[int, dict[str, Any]]) -> list[tuple[int, int, dict[str, Any]]]:
    """Settings for some numbers of slots as humming takes them: (above, up to, settings)."""
    found: list[tuple[int, int, dict[str, Any]]] = []
    for count in sorted(configs):
        low = found[-1][1] if found else 0
        if found and found[-1][2] == configs[count]:
            low = found.pop()[0]
        found.append((low, count, configs[count]))
    found[-1] = (found[-1][0], _EVERY_SIZE, found[-1][2])
    return found


def stacked(weights: Sequence[PackedWeight]) -> dict[str, Tensor]:
    """Canonical bytes of one or more projections, one under the other, by humming's names.

    Raises:
        ConfigError: an expert's global scales differ.
    """
    scales = [weight.scales for weight in weights if weight.scales is not None]
    tensors = {
        "weight": torch.cat([weight.codes for weight in weights], 1),
        "weight_scale": torch.cat(scales, 1),
    }
    factors = [weight.global_scale for weight in weights if weight.global_scale is not None]
    if factors:
        if not all(torch.equal(factor, factors[0]) for factor in factors):
            raise ConfigError("global scales differ; allowed: one for gate and up of an expert")
        tensors["weight_scale"] = tensors["weight_scale"].view(torch.float8_e4m3fn)
        tensors["weight_scale_2"] = factors[0]
    return tensors


def blocks_of(selection: Selection, num_experts: int, rows: int) -> dict[str, Tensor]:
    """The sort that an indexed product takes: each expert's slots, padded to blocks of `rows`
    with the number of slots; the expert of each block; how many entries there are.
    """
    order, counts = sorted_by_expert(selection, num_experts)
    blocks = (counts + rows - 1) // rows
    experts = torch.repeat_interleave(blocks)
    expert_of = torch.repeat_interleave(counts)
    first_slot, first_block = counts.cumsum(0) - counts, blocks.cumsum(0) - blocks
    place = torch.arange(order.numel(), device=order.device) - first_slot[expert_of]
    padded = torch.full(
        (experts.numel() * rows,), order.numel(), dtype=torch.int32, device=order.device
    )
    padded[first_block[expert_of] * rows + place] = order.int()
    count = torch.full((1,), padded.numel(), dtype=torch.int32, device=order.device)
    return {"sorted_ids": padded, "expert_ids": experts.int(), "num_tokens_padded": count}
