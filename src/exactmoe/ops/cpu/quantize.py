"""quantize: activations of class `a8`."""

from torch import Tensor

from exactmoe.formats.rows import Rows
from exactmoe.kernels.cpu import quantize as kernels
from exactmoe.ops.cpu.threads import launch


def quantize(values: Tensor, out: Rows) -> Rows:
    """Float32 [T, K], K a multiple of 128 -> decoded e4m3 values and scales, written to `out`."""
    assert out.scales is not None
    pieces = -(-values.shape[0] // kernels.PIECE_ROWS)
    launch(
        kernels.quantize,
        (values.numpy(), out.values.numpy(), out.scales.numpy()),
        pieces,
        values.numel(),
    )
    return out
