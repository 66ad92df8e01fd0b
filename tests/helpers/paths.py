"""One call of every op on a path, for tests that compare the bytes of two paths."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from exactmoe.config import Numerics
from exactmoe.formats import PackedWeight, quantize
from exactmoe.formats.rows import Rows
from exactmoe.ops import Path
from exactmoe.runtime.routes import RouteTable
from layers import assert_same_bits, fp8_blocks

FORMATS = ("nvfp4", "nvfp4-divide", "mxfp4", "bf16", "fp8")


def random_weight(rng: torch.Generator, format: str, *shape: int) -> PackedWeight:
    """Normal weights [E, N, K] as packed bytes; "nvfp4-divide" is compressed-tensors' dialect."""
    values = torch.randn(shape, generator=rng) / shape[-1] ** 0.5
    if format == "bf16":
        return PackedWeight("bf16", values.bfloat16())
    if format == "fp8":
        return fp8_blocks(values)
    packed = quantize(values, format.removesuffix("-divide"))
    if not format.endswith("-divide"):
        return packed
    assert packed.global_scale is not None
    return replace(packed, global_scale=1 / packed.global_scale, global_scale_op="divide")


def one_expert(weight: PackedWeight, expert: int = 0) -> PackedWeight:
    """A view of one expert."""
    parts = {
        name: None if (tensor := getattr(weight, name)) is None else tensor[expert : expert + 1]
        for name in ("codes", "scales", "global_scale")
    }
    return replace(weight, **parts)


@dataclass
class Call:
    """Inputs of one call of the routed experts, and everything that a path makes of them."""

    gate: PackedWeight
    up: PackedWeight
    down: PackedWeight
    x: Tensor
    expert_ids: Tensor
    weights: Tensor
    numerics: Numerics
    swiglu_limit: float | None = None
    shared: Tensor | None = None

    @classmethod
    def random(
        cls, rng: torch.Generator, format: str, activation: str, sizes: tuple[int, int], width: int
    ) -> "Call":
        """6 experts, top 4 with repeats, absent ids and ids >= E; a clamp that bites."""
        hidden, inner = sizes
        return cls(
            gate=random_weight(rng, format, 6, inner, hidden),
            up=random_weight(rng, format, 6, inner, hidden),
            down=random_weight(rng, format, 6, hidden, inner),
            x=torch.randn(width, hidden, generator=rng).bfloat16().float(),
            expert_ids=torch.randint(-1, 7, (width, 4), generator=rng).int(),
            weights=torch.randn(width, 4, generator=rng),
            numerics=Numerics.preset(activation),
            swiglu_limit=0.75,
            shared=torch.randn(width, hidden, generator=rng),
        )

    def run(self, path: Path) -> dict[str, Tensor]:
        """Every stage's result on a path; slots that nobody serves stay at the fill value."""
        tokens, top_k = self.expert_ids.shape
        slots, experts = tokens * top_k, self.gate.num_experts
        a8 = self.numerics.activation == "a8"
        routes = RouteTable(
            torch.full((experts + 1,), -7),
            torch.full((slots,), -7),
            torch.zeros(1, dtype=torch.int64),
        )
        path.route_table(self.expert_ids, experts, routes)
        rows = self._rows(path, self.x) if a8 else Rows(self.x, None)
        h = torch.full((slots, self.gate.rows), 3.0)
        prepared = [path.prepare(w) for w in (self.gate, self.up, self.down)]
        path.gate_up(
            rows,
            (prepared[0], prepared[1]),
            routes,
            self.weights if a8 else None,
            self.swiglu_limit,
            h,
        )
        h_rows = self._rows(path, h) if a8 else Rows(h, None)
        out = torch.full((slots, self.down.rows), 3.0)
        path.down(h_rows, prepared[2], routes, self.numerics, out)
        types = {"bf16": torch.bfloat16, "f32": torch.float32}
        y = torch.empty(tokens, self.down.rows, dtype=types[self.numerics.output])
        routed = (self.expert_ids, self.weights)
        path.combine(out, routed, experts, self.numerics, self.shared, y)
        present = int(routes.offsets[-1])
        parts = {"x": rows.values, "h": h, "h rows": h_rows.values, "slots": out, "y": y}
        parts |= {"offsets": routes.offsets, "order": routes.slots[:present], "fault": routes.fault}
        if a8:
            assert rows.scales is not None and h_rows.scales is not None
            parts |= {"x scales": rows.scales, "h scales": h_rows.scales}
        return parts

    def _rows(self, path: Path, values: Tensor) -> Rows:
        shape = (values.shape[0], values.shape[1] // 128)
        return path.quantize(values, Rows(torch.empty_like(values), torch.empty(shape)))


def assert_same_parts(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Equal bytes in every part; the message names the part."""
    assert found.keys() == expected.keys()
    for name in expected:
        try:
            assert_same_bits(found[name], expected[name])
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
