"""DenseLinear: one linear layer of packed weights, for what lies between the MLP blocks."""

import torch
from torch import Tensor

from exactmoe import ops
from exactmoe.block import Block, Space, say_first
from exactmoe.config import Limits, Numerics, checked_width
from exactmoe.errors import ConfigError
from exactmoe.formats import PackedWeight
from exactmoe.ops import Storage, compiled
from exactmoe.plan import (
    Explanation,
    Plan,
    TileChoice,
    WeightShape,
    choose,
    dense_tiles_of,
    explain,
    first_line,
)
from exactmoe.runtime.door import OUTPUT_DTYPES, check_x, output
from exactmoe.runtime.workspace import Region


class DenseLinear(Block):
    """y = x W^T with bf16 activations and one rounding: the dot of a dense part (contract sections
    4 and 7), so that a row's bits do not depend on the rows beside it.

    Args:
        weight: [G, N, K] of any format. G groups have inputs and outputs of their own: a token's
            K x G inputs make N x G outputs, group by group. A plain layer has one.
        limits: tokens a piece.
        backend: "auto", or a name of plan.BACKENDS.
        output: type of y: "bf16" or "f32".

    Raises:
        ConfigError: no PackedWeight, or an unknown output.
    """

    weight_codes: Tensor

    def __init__(
        self,
        weight: PackedWeight,
        limits: Limits | None = None,
        backend: str = "auto",
        output: str = "bf16",
    ) -> None:
        super().__init__(limits, backend)
        if not isinstance(weight, PackedWeight):
            raise ConfigError(f"weight is {type(weight).__name__}; allowed: PackedWeight")
        self.numerics = Numerics(output=output)
        self.register_packed("weight", weight)
        self._sizes = (weight.num_experts, weight.rows, weight.columns)
        self._kind = hash((weight.format, self._sizes, output))
        self._ready()

    @property
    def weight(self) -> PackedWeight:
        return self.packed("weight")

    @property
    def device(self) -> torch.device:
        return self.weight_codes.device

    @property
    def groups(self) -> int:
        """G."""
        return self._sizes[0]

    @property
    def in_features(self) -> int:
        """K x G."""
        return self._sizes[0] * self._sizes[2]

    @property
    def out_features(self) -> int:
        """N x G."""
        return self._sizes[0] * self._sizes[1]

    def plan(self) -> Plan:
        return choose(self.numerics, self.device, self.backend)

    def regions(self, rows: int, storage: Storage) -> list[Region]:
        x = Region("x", (rows, self.in_features), storage.x)
        if self._rounds(storage):
            return [x]
        return [x, Region("linear_out", (rows, self.out_features), torch.float32)]

    def _rounds(self, storage: Storage) -> bool:
        """Whether the op writes y itself: the wide layers of attention would need much scratch."""
        return storage.reads_given and self.numerics.output == "bf16"

    def explain(self, width: int = 8) -> Explanation:
        """Which path runs a call of `width` tokens, and why."""
        plan, weights = self.plan(), (self.weight,)
        tiles = self.tiles(plan, min(checked_width(width), self.max_rows))
        return explain(plan, self.numerics, self.limits, width, weights, tiles, ("weight",))

    def tiles(self, plan: Plan, num_tokens: int) -> tuple[TileChoice, ...]:
        """The tile that runs a piece of `num_tokens` on a path."""
        shape = WeightShape(self._packed_meta["weight"][0], *self._sizes[1:])
        return dense_tiles_of(plan, {"linear": shape}, num_tokens, self.groups)

    def _first_line(self, num_tokens: int) -> str:
        plan, formats = self.plan(), (self._packed_meta["weight"][0],)
        return first_line(plan, self.numerics, formats, self.tiles(plan, num_tokens))

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x bfloat16 [T, K x G] -> y [T, N x G]. x is not written; y shares memory with nothing."""
        if torch.compiler.is_compiling():
            compiled.refuse_out(out is not None)
            dtype = OUTPUT_DTYPES[self.numerics.output]
            return compiled.block(self, DenseLinear.forward, x, None, dtype, self.out_features)
        check_x(x, self.in_features, self.device)
        own = {} if out is None else self._own_memory()
        y = output(out, {"x": x}, own, self.out_features, self.numerics.output)
        groups, rows, columns = self._sizes

        def compute(space: Space, piece: slice) -> None:
            path, target = space.path, y[piece]
            count, rounds = target.shape[0], self._rounds(path.storage)
            say_first(space, self._kind, count, lambda: self._first_line(count))
            dense = target if rounds else space.rows("linear_out", count)
            values = space.staged(x[piece]).view(count, groups, columns)
            weight = self.prepared("weight", path.name, path.prepare)
            path.dense_linear(values, weight, dense.view(count, groups, rows))
            if not rounds:
                path.finish(dense, target)

        self._in_pieces(x.shape[0], compute)
        return y

    def _prepare(self, path: ops.Path) -> None:
        self.prepared("weight", path.name, path.prepare)

    def extra_repr(self) -> str:
        format = self._packed_meta["weight"][0]
        groups = f", groups={self.groups}" if self.groups > 1 else ""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}{groups}, format={format}"
