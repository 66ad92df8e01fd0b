"""The CPU router gives the reference's ids and the reference's bytes of the weights."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from exactmoe import ops
from exactmoe.config import Numerics, RouterConfig
from exactmoe.ops.cpu import threads
from layers import assert_same_bits

NAN, INF = float("nan"), float("inf")
CONFIGS = [
    RouterConfig(score="sigmoid", factor=2.5),
    RouterConfig(score="sqrt_softplus", factor=1.5),
    RouterConfig(score="sigmoid", factor=1.1, normalize=False),
]


@dataclass
class Weights:
    weight_f32: Tensor
    bias: Tensor | None
    table: Tensor | None
    config: RouterConfig


def route(
    path: str,
    x: Tensor,
    weights: Weights,
    top_k: int,
    numerics: Numerics | None = None,
    token_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    ids = torch.full((len(x), top_k), -9, dtype=torch.int32)
    out = torch.full((len(x), top_k), -9.0)
    logits = torch.empty(x.shape[0], weights.weight_f32.shape[0])
    ops.path(path).router(x, weights, token_ids, numerics or Numerics(), logits, (ids, out), None)
    return ids, out


def compare(*call) -> tuple[Tensor, Tensor]:
    found, expected = route("cpu", *call), route("reference", *call)
    assert_same_bits(found[0], expected[0])
    assert_same_bits(found[1], expected[1])
    return found


def random_weights(rng: torch.Generator, experts: int, hidden: int, config=CONFIGS[0]) -> Weights:
    weight = torch.randn(experts, hidden, generator=rng).bfloat16().float() / hidden**0.5
    return Weights(weight, torch.randn(experts, generator=rng) * 0.1, None, config)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("router", ["f32", "bf16_ladder"])
@pytest.mark.parametrize(
    ("experts", "hidden", "top_k"), [(5, 96, 2), (257, 272, 8), (33, 1040, 16)]
)
def test_scores(config, router, experts, hidden, top_k, rng):
    x = torch.randn(7, hidden, generator=rng).bfloat16().float() * 3
    weights = random_weights(rng, experts, hidden, config)
    compare(x, weights, top_k, Numerics(router=router))


@pytest.mark.parametrize("width", [0, 1, 2, 4, 5, 64])
def test_widths(width, rng):
    x = torch.randn(width, 160, generator=rng).bfloat16().float()
    compare(x, random_weights(rng, 40, 160), 4)


@pytest.mark.parametrize("config", CONFIGS)
def test_hash_layers_take_the_tables_ids_even_repeated(config, rng):
    weights = random_weights(rng, 12, 64, config)
    weights.bias = None
    weights.table = torch.randint(0, 12, (30, 3), generator=rng)
    weights.table[4] = 7
    tokens = torch.tensor([4, 0, 29, 4, 11])
    x = torch.randn(5, 64, generator=rng).bfloat16().float()
    ids, _ = compare(x, weights, 3, Numerics(), tokens)
    assert ids.tolist() == weights.table[tokens].tolist()


@pytest.mark.parametrize("wrong", [-1, 30, 2**40, -(2**63), 2**63 - 1])
def test_a_token_id_outside_the_table_reads_nothing_and_is_reported(wrong, rng):
    """The door checks token ids, but their owner may write them while the call runs."""
    weights = random_weights(rng, 12, 64)
    weights.bias, weights.table = None, torch.randint(0, 12, (30, 3), generator=rng)
    x = torch.randn(4, 64, generator=rng).bfloat16().float()
    tokens = torch.tensor([4, 0, 29, 11])
    ids, values = compare(x, weights, 3, Numerics(), tokens)
    tokens[1] = wrong
    found = route("cpu", x, weights, 3, token_ids=tokens)
    assert found[0][1].tolist() == [12] * 3  # no expert: the route table reports it
    assert found[1][1].tolist() == [0.0] * 3
    for before, after in zip((ids, values), found, strict=True):
        assert_same_bits(after[[0, 2, 3]], before[[0, 2, 3]])


@pytest.mark.parametrize("wrong", [-1, 12, 2**40])
def test_an_id_in_the_table_that_no_expert_has_reads_nothing_and_is_reported(wrong, rng):
    weights = random_weights(rng, 12, 64)
    weights.bias, weights.table = None, torch.randint(0, 12, (30, 3), generator=rng)
    weights.table[0, 1] = wrong
    x = torch.randn(2, 64, generator=rng).bfloat16().float()
    ids, values = route("cpu", x, weights, 3, token_ids=torch.tensor([0, 4]))
    assert ids[0].tolist() == [int(weights.table[0, 0]), 12, int(weights.table[0, 2])]
    assert values[0, 1] == 0.0
    assert ids[1].tolist() == weights.table[4].tolist()


def test_equal_keys_go_to_the_lower_id(rng):
    x = torch.zeros(3, 32)
    weights = random_weights(rng, 300, 32)
    weights.bias = torch.zeros(300)
    weights.bias[1::2] = -0.0
    ids, _ = compare(x, weights, 8)
    assert ids.tolist() == [list(range(8))] * 3


def test_nan_keys_come_last_by_lower_id(rng):
    x = torch.zeros(2, 32)
    weights = random_weights(rng, 6, 32)
    weights.bias = torch.tensor([NAN, -INF, NAN, 0.5, INF, NAN])
    ids, _ = compare(x, weights, 5)
    assert ids.tolist() == [[4, 3, 1, 0, 2]] * 2


@pytest.mark.parametrize("value", [NAN, -NAN, INF, -INF, 3e38])
def test_special_values_stay_with_their_token(value, rng):
    x = torch.randn(6, 64, generator=rng).bfloat16().float()
    weights = random_weights(rng, 16, 64)
    clean = compare(x, weights, 4)
    x[3, 5] = torch.tensor(value).bfloat16().float()
    dirty = compare(x, weights, 4)
    others = [t for t in range(6) if t != 3]
    for before, after in zip(clean, dirty, strict=True):
        assert_same_bits(after[others], before[others])


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 1e4, 1e20])
@pytest.mark.parametrize("config", CONFIGS[:2])
def test_scores_of_every_size(scale, config, rng):
    x = (torch.randn(9, 64, generator=rng) * scale).bfloat16().float()
    compare(x, random_weights(rng, 64, 64, config), 6)


def test_threads_do_not_change_a_bit(rng, monkeypatch):
    x = torch.randn(21, 256, generator=rng).bfloat16().float()
    weights = random_weights(rng, 288, 256)
    expected = route("cpu", x, weights, 8)
    monkeypatch.setattr(threads, "WORK_PER_THREAD", 1)
    monkeypatch.setenv("EXACTMOE_THREADS", "7")
    found = route("cpu", x, weights, 8)
    assert_same_bits(found[0], expected[0])
    assert_same_bits(found[1], expected[1])


def test_a_planted_fault_is_seen(rng):
    x = torch.randn(4, 64, generator=rng).bfloat16().float()
    weights = random_weights(rng, 16, 64)
    expected = route("reference", x, weights, 4)
    assert weights.bias is not None
    weights.bias[int(expected[0][0, 0])] -= 1.0
    with pytest.raises(AssertionError, match="differ"):
        assert_same_bits(route("cpu", x, weights, 4)[0], expected[0])
