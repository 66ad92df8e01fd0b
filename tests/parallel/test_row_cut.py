"""Output rows over ranks: every row once, in whole blocks; and the bits of an uncut MLP."""

import pytest
import torch

from exactmoe import DenseMLP, Limits, MoELayer
from exactmoe.formats import PackedWeight, quantize
from exactmoe.parallel.rank_wire import RankWire
from exactmoe.parallel.ranks import Ranks
from exactmoe.parallel.row_cut import RowCut
from exactmoe.ranked import RankedLayer
from exactmoe.ranked_dense import RankedDense, cuts, own_rows
from layers import assert_same_bits, fp8_blocks, normal
from rank_processes import SIZES
from small_layers import EXPERTS, small_layer


def test_bounds_of_published_sizes():
    assert RowCut.of("bf16", 2048, 2) == RowCut((0, 1024, 2048))
    assert RowCut.of("fp8", 2048, 3) == RowCut((0, 768, 1408, 2048))
    assert RowCut.of("nvfp4", 12288, 8) == RowCut(tuple(range(0, 12289, 1536)))
    assert RowCut.of("fp8", 4096, 5) == RowCut((0, 896, 1792, 2560, 3328, 4096))


@pytest.mark.parametrize("rows", [64, 100, 2048])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_row_has_one_rank(rows, ranks):
    cut = RowCut.of("bf16", rows, ranks)
    assert cut is not None
    found = [row for rank in range(ranks) for row in range(rows)[cut.part(rank)]]
    assert found == list(range(rows))
    assert all(start % 16 == 0 for start in cut.bounds[:-1])
    assert cut.most == max(map(cut.count, range(ranks)))


@pytest.mark.parametrize(
    ("format", "rows", "ranks"), [("bf16", 48, 4), ("fp8", 256, 3), ("mxfp4", 4096, 2)]
)
def test_what_cannot_be_cut(format, rows, ranks):
    assert RowCut.of(format, rows, ranks) is None


def one_expert(format: str, values: torch.Tensor) -> PackedWeight:
    if format == "bf16":
        return PackedWeight("bf16", values.bfloat16()[None])
    return fp8_blocks(values[None]) if format == "fp8" else quantize(values[None], format)


def weights(rng, format: str, hidden: int, inner: int) -> tuple[PackedWeight, ...]:
    shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
    return tuple(one_expert(format, normal(rng, *shape, scale=0.1).float()) for shape in shapes)


def cut_dense(whole, ranks: Ranks, **settings) -> RankedDense:
    """The rows of this rank, of weights that every rank has."""
    formats = [weight.format for weight in whole]
    cut = cuts(formats, whole[0].columns, whole[0].rows, ranks.size)
    assert cut is not None
    return RankedDense(own_rows(whole, cut, ranks.rank), cut, ranks, **settings)


DENSE = [("bf16", 64, 96), ("nvfp4", 112, 64), ("fp8", 512, 512), ("bf16", 4160, 64)]


def dense(ranks: Ranks) -> int:
    compared = 0
    for format, hidden, inner in DENSE:
        for backend in ("cpu", "reference") if hidden < 100 else ("cpu",):
            rng = torch.Generator().manual_seed(31)
            whole = weights(rng, format, hidden, inner)
            settings = {"swiglu_limit": 1.5, "limits": Limits(max_rows=32), "backend": backend}
            alone = DenseMLP(*whole, **settings)
            cut = cut_dense(whole, ranks, **settings)
            assert ranks.size == 1 or cut.bank.nbytes < alone.bank.nbytes
            for width in (1, 6, 65):
                x = normal(rng, width, hidden)
                assert_same_bits(cut(x), alone(x), f"{format} {hidden} {backend} {width}")
                compared += 1
    return compared


@pytest.mark.parametrize("size", SIZES)
def test_dense_mlp_has_the_bits_of_one_card(pool, size):
    assert min(pool.run(dense, size)) == 15


def whole_block(ranks: Ranks) -> str:
    rng = torch.Generator().manual_seed(32)
    layer = small_layer(rng)
    parts = (layer.shared.bank.gate, layer.shared.bank.up, layer.shared.bank.down)
    shared = cut_dense(parts, ranks, swiglu_limit=10.0)
    wire = RankWire(ranks, EXPERTS)
    cut = RankedLayer(layer.config, layer.bank, wire, layer.router, shared)
    for width in (1, 6, 65):
        x = normal(rng, width, layer.config.hidden_size)
        assert_same_bits(cut(x), layer(x), str(width))
    cut.check()
    return str(cut.explain())


@pytest.mark.parametrize("size", SIZES)
def test_block_with_a_cut_shared_expert(pool, size):
    for rank, text in enumerate(pool.run(whole_block, size)):
        assert f"rank {rank}: " in text and "shared expert: by output rows" in text
        assert text.count("this process") == 1


def refused(ranks: Ranks) -> list[str]:
    rng = torch.Generator().manual_seed(33)
    messages = []
    layer: MoELayer = small_layer(rng)
    parts = (layer.shared.bank.gate, layer.shared.bank.up, layer.shared.bank.down)
    for make in (
        lambda: RankedDense(parts, cuts(("bf16",) * 3, 64, 64, ranks.size), ranks),
        lambda: RankedLayer(
            layer.config,
            layer.bank,
            RankWire(ranks, EXPERTS, tokens="own"),
            layer.router,
            cut_dense(parts, ranks),
        ),
    ):
        try:
            make()
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_refusals(pool):
    for uncut, own in pool.run(refused, 2):
        assert "gate, up and down are [(64, 64), " in uncut
        assert "(rows, columns); the cut gives rank" in uncut
        assert "tokens is 'own'" in own and "cut by output rows" in own
