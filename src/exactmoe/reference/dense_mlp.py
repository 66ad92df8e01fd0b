"""Dense MLP (dense FFN, shared expert): bf16 activations in both classes, segments of 4096
(contract sections 4, 7).
"""

from torch import Tensor

from exactmoe.formats import PackedWeight, apply_global_scale, operand
from exactmoe.reference.dot import DENSE_SEGMENT, dot_blocks, dot_dense
from exactmoe.reference.functions import canonical, swiglu32, to_bf16


def dense_mlp(
    x: Tensor, gate: PackedWeight, up: PackedWeight, down: PackedWeight, limit: float | None
) -> Tensor:
    """x bfloat16 [T, H], one-expert weights -> float32 [T, H], before any rounding to an output
    type.
    """
    h = to_bf16(swiglu32(_project(gate, x), _project(up, x), limit))
    return canonical(_project(down, h))


def _project(weight: PackedWeight, x: Tensor) -> Tensor:
    w, rows = operand(weight, 0), x.float()
    if weight.format == "fp8":
        assert weight.scales is not None
        return dot_blocks(w, rows, weight.scales[0], segment=DENSE_SEGMENT)
    return apply_global_scale(weight, 0, dot_dense(w, rows))
