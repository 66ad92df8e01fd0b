"""Cards for tests: two streams of one GPU, two GPUs, CPUs; and calls in graphs."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from gpu_layers import Layer

CPU = ("cpu", "cpu")
CARDS = [
    pytest.param(("cuda:0", "cuda:0"), marks=pytest.mark.gpu, id="one GPU"),
    pytest.param(("cuda:0", "cuda:1"), marks=pytest.mark.two_gpu, id="two GPUs"),
    pytest.param(CPU, id="CPU"),
]
EXPERTS, TOP_K = 16, 6
CLASSES = {
    "a16": Layer(experts=EXPERTS, top_k=TOP_K, max_rows=4096),
    "a8": Layer("mxfp4", "a8", experts=EXPERTS, top_k=TOP_K, hashed=True, max_rows=4096),
}


@cache
def _stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def captured(
    run: Callable[[], Any], stream: torch.cuda.Stream | None = None
) -> tuple[torch.cuda.CUDAGraph, Any]:
    """run() in a graph, after one eager call on the capture's stream, by default the same for all:
    each has an arena of its own.
    """
    stream = stream or _stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        y = run()
    return graph, y
