"""dense_linear: a linear layer of packed weights."""

import torch
from torch import Tensor

from exactmoe.kernels.triton.dense_linear import dense_linear as kernel
from exactmoe.ops.triton.dense_mlp import dense_launch, fitted
from exactmoe.ops.triton.launch import Launch, architecture
from exactmoe.ops.triton.prepare import TritonWeight
from exactmoe.plan.tiles import Tile, tile


def dense_linear(x: Tensor, weight: TritonWeight, out: Tensor, backend: str) -> None:
    """x bfloat16 [T, G, K] -> out float32 [T, G, N] before its rounding, or bfloat16 as `finish`
    rounds it.

    backend: whose tiles it takes, as in dense_mlp.
    """
    name = architecture(x.device)
    chosen = tile(backend, name, "dense_mlp", x.shape[0], 1)
    launch(x, weight, out, chosen, name).run()


def launch(x: Tensor, weight: TritonWeight, out: Tensor, tile: Tile, architecture: str) -> Launch:
    """The launch with a given tile of the dense parts."""
    rounded = out.dtype == torch.bfloat16
    arguments = {
        "x": (x, x.stride(0), x.stride(1)),
        "weight": weight.arguments,
        "out": (out.view(torch.int16) if rounded else out, out.stride(0), out.stride(1)),
        "num_tokens": x.shape[0],
        "rows": weight.weight.rows,
    }
    constants = {"DIVIDE": weight.divide, "ROUND": rounded}
    cut = fitted(tile, weight, 1, x.shape[0])
    return dense_launch(kernel, weight, arguments, constants, cut, architecture)
