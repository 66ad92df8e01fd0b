"""What `layer.explain()` says: the path, the numerics, the pieces, and the matrix units of each
projection.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from exactmoe.config import Limits, Numerics
from exactmoe.formats import PackedWeight, fp8_exact
from exactmoe.plan.choose import Plan


@dataclass(frozen=True)
class Explanation:
    """Which path runs a call of `width` tokens, and why.

    Attributes:
        fp8_experts: of gate, up and down, how many experts the fp8 matrix units hold without losing
            a bit.
    """

    plan: Plan
    numerics: Numerics
    width: int
    pieces: int
    formats: tuple[str, ...]
    num_experts: int
    fp8_experts: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "backend": self.plan.backend,
            "device": self.plan.device,
            "reason": self.plan.reason,
            "rejected": {r.backend: r.reason for r in self.plan.rejected},
            "numerics": self.numerics.to_dict(),
            "width": self.width,
            "pieces": self.pieces,
            "formats": list(self.formats),
            "num_experts": self.num_experts,
            "fp8_experts": list(self.fp8_experts),
        }

    def __str__(self) -> str:
        names = ("gate", "up", "down")
        units = ", ".join(
            f"{name} {format} ({fp8} of {self.num_experts} exact on fp8 units)"
            for name, format, fp8 in zip(names, self.formats, self.fp8_experts, strict=True)
        )
        calls = f"{self.width} tokens in {self.pieces} piece{'s' if self.pieces != 1 else ''}"
        return f"{self.plan}\n  {calls}; activations {self.numerics.activation}\n  {units}"


def explain(
    plan: Plan, numerics: Numerics, limits: Limits, width: int, weights: Sequence[PackedWeight]
) -> Explanation:
    """Put together an Explanation; `weights` are gate, up and down."""
    return Explanation(
        plan=plan,
        numerics=numerics,
        width=width,
        pieces=-(-width // limits.max_rows),
        formats=tuple(w.format for w in weights),
        num_experts=weights[0].num_experts,
        fp8_experts=tuple(int(fp8_exact(w).sum()) for w in weights),
    )
