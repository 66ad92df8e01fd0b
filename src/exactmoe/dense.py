"""DenseMLP: dense FFN layers and shared experts."""

from collections.abc import Callable

import torch
from torch import Tensor

from exactmoe import ops
from exactmoe.bank import ExpertBank
from exactmoe.block import Block, Space, say_first
from exactmoe.config import Limits, Numerics, checked_swiglu_limit, checked_width
from exactmoe.errors import ConfigError
from exactmoe.formats import PackedWeight
from exactmoe.ops import Storage, compiled
from exactmoe.plan import Explanation, Plan, TileChoice, choose, explain, first_line, mlp_tiles_of
from exactmoe.runtime.door import OUTPUT_DTYPES, check_x, output
from exactmoe.runtime.workspace import Region


class DenseMLP(Block):
    """A dense SwiGLU MLP (dense FFN or shared expert), bf16 activations (contract sections 4 and
    7).

    Args:
        gate, up: bfloat16 [I, H], or a PackedWeight of one expert.
        down: bfloat16 [H, I], or a PackedWeight of one expert.
        swiglu_limit: clamp of gate (from above) and up (both sides); None: no clamp.
        limits: tokens a piece.
        backend: "auto", or a name of plan.BACKENDS.
        output: type of y: "bf16" or "f32".
    """

    def __init__(
        self,
        gate: Tensor | PackedWeight,
        up: Tensor | PackedWeight,
        down: Tensor | PackedWeight,
        swiglu_limit: float | None = None,
        limits: Limits | None = None,
        backend: str = "auto",
        output: str = "bf16",
    ) -> None:
        super().__init__(limits, backend)
        bank = ExpertBank(
            _one_expert("gate", gate), _one_expert("up", up), _one_expert("down", down)
        )
        self._hold(bank, swiglu_limit, output)

    def _hold(self, bank: ExpertBank, swiglu_limit: float | None, output: str) -> None:
        """Takes the weights, and ends the making of the layer."""
        self.bank = bank
        self.swiglu_limit = checked_swiglu_limit(swiglu_limit)
        self.numerics = Numerics(output=output)
        self._ready()

    @property
    def device(self) -> torch.device:
        return self.bank.device

    @property
    def hidden_size(self) -> int:
        return self.bank.hidden_size

    @property
    def intermediate_size(self) -> int:
        return self.bank.intermediate_size

    def plan(self) -> Plan:
        return choose(self.numerics, self.device, self.backend, dense=self.bank.shapes)

    def regions(self, rows: int, storage: Storage) -> list[Region]:
        return dense_regions(self.hidden_size, self.intermediate_size, rows, storage)

    def explain(self, width: int = 8) -> Explanation:
        """Which path runs a call of `width` tokens, and why."""
        plan, weights = self.plan(), self.bank.weights()
        tiles = self.tiles(plan, min(checked_width(width), self.max_rows))
        return explain(plan, self.numerics, self.limits, width, weights, tiles)

    def tiles(self, plan: Plan, num_tokens: int) -> tuple[TileChoice, ...]:
        """The tiles that run a piece of `num_tokens` on a path."""
        return mlp_tiles_of(plan, self.bank.shapes, num_tokens)

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x bfloat16 [T, H] -> y [T, H]. x is not written; y shares memory with nothing."""
        if torch.compiler.is_compiling():
            compiled.refuse_out(out is not None)
            dtype = OUTPUT_DTYPES[self.numerics.output]
            return compiled.block(self, DenseMLP.forward, x, None, dtype)
        check_x(x, self.hidden_size, self.device)
        own = {} if out is None else self._own_memory()
        y = output(out, {"x": x}, own, self.hidden_size, self.numerics.output)

        def compute(space: Space, piece: slice) -> None:
            self.say_first(space, y[piece].shape[0], self.plan)
            space.path.finish(self.run(space, space.staged(x[piece])), y[piece])

        self._in_pieces(x.shape[0], compute)
        return y

    def run(self, space: Space, x: Tensor) -> Tensor:
        """One piece in the given workspace: x [T, H] as the path reads it -> float32 [T, H] in
        `dense_out`, not yet rounded.
        """
        h, result = (space.rows(name, x.shape[0]) for name in ("dense_h", "dense_out"))
        gate, up, down = self.bank.prepared_for(dense_path(space.path))
        space.path.dense_mlp(x, (gate, up, down), self.swiglu_limit, h, result)
        return result

    def say_first(self, space: Space, num_tokens: int, plan: Callable[[], Plan]) -> None:
        """Log what runs `num_tokens` when it first does; plan: of the layer that calls `run`."""

        def text() -> str:
            found = plan()
            tiles = self.tiles(found, num_tokens)
            return first_line(found, self.numerics, self.bank.formats, tiles)

        # Of the weights as they are now: where they lie may choose another kernel.
        say_first(space, hash((self.bank.shapes, self.numerics.output)), num_tokens, text)

    def _prepare(self, path: ops.Path) -> None:
        self.bank.prepared_for(dense_path(path))


def dense_regions(
    hidden_size: int, intermediate_size: int, rows: int, storage: Storage
) -> list[Region]:
    """The workspace of a piece of `rows` tokens of a dense MLP, without a layer."""
    return [
        Region("x", (rows, hidden_size), storage.x),
        Region("dense_h", (rows, intermediate_size), storage.h),
        Region("dense_out", (rows, hidden_size), torch.float32),
    ]


def dense_path(path: ops.Path) -> ops.Path:
    """Whose form of the weights the dense parts of a layer on `path` read: canonical order."""
    return path if path.storage.layout == ops.CANONICAL else ops.path("triton")


def _one_expert(name: str, weight: Tensor | PackedWeight) -> PackedWeight:
    if isinstance(weight, PackedWeight):
        if weight.num_experts != 1:
            raise ConfigError(f"{name} holds {weight.num_experts} experts; a dense MLP takes one")
        return weight
    if not isinstance(weight, Tensor) or weight.dtype != torch.bfloat16 or weight.ndim != 2:
        found = (
            f"{weight.dtype} {tuple(weight.shape)}"
            if isinstance(weight, Tensor)
            else type(weight).__name__
        )
        raise ConfigError(
            f"{name} is {found}; allowed: a bfloat16 matrix or a PackedWeight of one expert"
        )
    return PackedWeight("bf16", weight.detach()[None])
