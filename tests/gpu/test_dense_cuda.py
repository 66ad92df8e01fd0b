"""The dense kernels of sm_90 give the bits of the Triton path: every tile, tails of tokens and of
rows, k in segments, NaN and Inf in some tokens, eager and captured.
"""

import pytest
import torch
from torch import Tensor

from exactmoe.kernels.cuda import compile as compiler
from exactmoe.ops.cuda import dense_mlp as cuda
from exactmoe.ops.triton import dense_mlp as portable
from exactmoe.ops.triton.prepare import TritonWeight, prepare
from exactmoe.plan.dense_tiles import DENSE_TILES, WIDEST_SEGMENTED, DenseTile
from exactmoe.plan.tiles import TILES
from gpu_layers import generator, packed
from layers import assert_same_bits

pytestmark = pytest.mark.gpu
LIMIT = 1.5
# (H, I, widths): k short of a stage and of a cluster's rows; a shared expert; segments.
SIZES = {
    "192 x 320": (192, 320, (1, 7, 40, 257)),
    "256 x 4160": (256, 4160, (1, 17, 200)),
    "4096 x 2048": (4096, 2048, (1, 8, 9, 16, 33, 64, 65, 129, 256, 257, 1025, 4096)),
    "4096 x 12288": (4096, 12288, (1, 16, 65, 300)),
}
Weights = tuple[TritonWeight, TritonWeight, TritonWeight]


class Reference:
    """Weights, tokens, and h and out of the Triton path at the most tokens."""

    def __init__(self, hidden: int, inner: int, tokens: int) -> None:
        rng = generator("cuda", hidden + inner)
        shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
        made = [prepare(packed(rng, "bf16", 1, *shape)) for shape in shapes]
        self.weights: Weights = (made[0], made[1], made[2])
        self.x = 2 * torch.randn(tokens, hidden, generator=rng, device="cuda")
        self.x = self.x.bfloat16()
        if tokens > 5:
            self.x[3, 5], self.x[4, 7] = float("nan"), float("inf")
        self.h = torch.empty(tokens, inner, device="cuda", dtype=torch.bfloat16)
        self.out = torch.empty(tokens, hidden, device="cuda")
        tile = TILES["triton"]["dense_mlp"][0]
        arguments = (self.x, self.weights, LIMIT, self.h, self.out, tile, "sm_90")
        for launch in portable.launches(*arguments):
            launch.run()


@pytest.fixture(scope="module", params=SIZES)
def reference(request):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma is an instruction of sm_90")
    if compiler.missing() is not None:
        pytest.skip(f"no NVRTC: {compiler.missing()}")
    hidden, inner, widths = SIZES[request.param]
    return Reference(hidden, inner, max(widths)), widths


def poisoned(like: Tensor, tokens: int) -> Tensor:
    """[T + 1, N] of NaN; nobody may write the last row."""
    return torch.full((tokens + 1, like.shape[1]), float("nan"), device="cuda", dtype=like.dtype)


def launch(op: str, tile: DenseTile, given: Reference, tokens: int, span: int) -> Tensor:
    """What a tile makes of the first tokens, `span` a block; down reads the reference's h."""
    gate, up, down = (weight.weight.codes[0] for weight in given.weights)
    matrices = (gate, up) if op == "gate_up" else (down, down)
    rows = given.x if op == "gate_up" else given.h
    result = poisoned(given.h if op == "gate_up" else given.out, tokens)
    variant = cuda.variant_of(op, matrices[0].shape[1], tile)
    one = cuda.DenseLaunch(variant, matrices, rows[:tokens], result[:tokens], LIMIT, span)
    one.run(early=False)
    return result


@pytest.mark.parametrize("tile", DENSE_TILES, ids=lambda tile: f"{tile} b{tile.blocks}")
@pytest.mark.parametrize("op", ["gate_up", "down"])
def test_every_tile(reference, op, tile):
    given, widths = reference
    columns = (given.x if op == "gate_up" else given.h).shape[1]
    if columns > 4096 and tile.tokens > WIDEST_SEGMENTED:
        pytest.skip("not offered where k is segmented")
    expected = given.h if op == "gate_up" else given.out
    # All of a tile's tokens; a few less; pieces of a cluster without tokens.
    spans = {tile.tokens, max(tile.tokens * 5 // 8, 1), max(tile.tokens - 1, 1)}
    for tokens in widths:
        for span in spans:
            result = launch(op, tile, given, tokens, span)
            said = f"{tokens} tokens, {span} a block"
            assert_same_bits(result[:tokens], expected[:tokens], said)
            assert result[tokens].isnan().all()


def test_the_op_eager_and_captured(reference):
    given, widths = reference
    for tokens in widths:
        h, out = poisoned(given.h, tokens), poisoned(given.out, tokens)
        arguments = (given.x[:tokens], given.weights, LIMIT, h[:tokens], out[:tokens])
        assert cuda.takes(given.weights)
        cuda.dense_mlp(*arguments)
        assert_same_bits(out[:tokens], given.out[:tokens], f"{tokens} tokens, eager")
        out.fill_(float("nan"))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            cuda.dense_mlp(*arguments)
            cuda.dense_mlp(*arguments)
        for _ in range(5):
            h.fill_(float("nan"))
            graph.replay()
        assert_same_bits(out[:tokens], given.out[:tokens], f"{tokens} tokens, captured")
        assert out[tokens].isnan().all() and h[tokens].isnan().all()


def test_no_clamp_and_rows_of_a_wider_tensor(reference):
    given, _ = reference
    tokens, hidden = 5, given.x.shape[1]
    wide = torch.zeros(tokens, hidden + 64, device="cuda", dtype=torch.bfloat16)
    wide[:, :hidden] = given.x[:tokens]
    results = []
    for x in (given.x[:tokens], wide[:, :hidden]):
        h, out = poisoned(given.h, tokens)[:tokens], poisoned(given.out, tokens)[:tokens]
        cuda.dense_mlp(x, given.weights, None, h, out)
        results.append(out)
    h, out = torch.empty_like(given.h[:tokens]), torch.empty_like(given.out[:tokens])
    tile = TILES["triton"]["dense_mlp"][0]
    launches = portable.launches(given.x[:tokens], given.weights, None, h, out, tile, "sm_90")
    for one in launches:
        one.run()
    for result in results:
        assert_same_bits(result, out)
