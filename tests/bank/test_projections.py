"""What holds gate, up and down says of them the same, by one definition."""

from types import SimpleNamespace

import pytest
import torch

from exactmoe import ExpertBank, Partition
from exactmoe.bank import SplitBank
from exactmoe.bank.projections import Projections
from exactmoe.parallel.rank_bank import RankBank
from exactmoe.plan import WeightShape
from exactmoe.ranked_dense import CutWeights
from layers import FORMATS, assert_same_bits, random_bank

HIDDEN, INNER = 64, 96
SHARED = ("gate", "up", "down", "hidden_size", "intermediate_size")


def split_bank(bank: ExpertBank) -> SplitBank:
    return bank.split(Partition.even(bank.num_experts, 2), ["cpu", "cpu"], keep=True)


def rank_bank(bank: ExpertBank) -> RankBank:
    ranks = SimpleNamespace(rank=0, device=torch.device("cpu"))
    return RankBank(bank, SimpleNamespace(experts=tuple(range(bank.num_experts)), ranks=ranks))


KINDS = {
    "ExpertBank": lambda bank: bank,
    "CutWeights": lambda bank: CutWeights(*bank.weights()),
    "SplitBank": split_bank,
    "RankBank": rank_bank,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", FORMATS)
def test_every_holder_says_the_same(kind, format, rng):
    bank = random_bank(rng, format, 2, HIDDEN, INNER)
    holder = KINDS[kind](bank)
    assert type(holder).__name__ == kind
    for name in SHARED:  # no definition of its own
        assert getattr(type(holder), name) is getattr(Projections, name), name
    assert (holder.hidden_size, holder.intermediate_size) == (HIDDEN, INNER)
    sizes = ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
    assert [shape[:3] for shape in holder.shapes] == [(format, *size) for size in sizes]
    assert holder.formats == (format,) * 3
    assert holder.device == torch.device("cpu")
    assert holder.nbytes == bank.nbytes
    for name, weight in zip(("gate", "up", "down"), holder.weights(), strict=True):
        for part in ("codes", "scales", "global_scale"):
            given = getattr(getattr(bank, name), part)
            for found in (getattr(weight, part), getattr(getattr(holder, name), part)):
                assert (found is None) == (given is None)
                if given is not None:
                    assert_same_bits(found, given)


def test_rows_of_one_rank(rng):
    """gate and up have some rows of I; down's columns are all of them."""
    bank = random_bank(rng, "mxfp4", 1, HIDDEN, INNER)
    gate, up, down = (
        type(weight)("mxfp4", weight.codes[:, :rows], weight.scales[:, :rows])
        for weight, rows in zip(bank.weights(), (32, 32, 16), strict=True)
    )
    cut = CutWeights(gate, up, down)
    assert (cut.hidden_size, cut.intermediate_size) == (HIDDEN, INNER)
    assert cut.shapes == (
        WeightShape("mxfp4", 32, HIDDEN),
        WeightShape("mxfp4", 32, HIDDEN),
        WeightShape("mxfp4", 16, INNER),
    )
    rows = 32 * HIDDEN * 2 + 16 * INNER
    assert cut.nbytes == rows // 2 + rows // 32
