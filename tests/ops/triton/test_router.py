"""The router on the card's path: ids and weights have the reference's bytes for given logits; the
logits are compared with float64 (dots of matrix units differ from the CPU's in their low bits), and
with each other.
"""

import pytest
import torch
from torch import Tensor

from exactmoe import reference
from exactmoe.config import Numerics, RouterConfig
from exactmoe.ops.triton.router import router, select
from layers import assert_same_bits
from router_tensors import RouterTensors
from triton_device import DEVICE, INTERPRETED

NAN, INF = float("nan"), float("inf")
CONFIGS = [
    RouterConfig(score="sigmoid", factor=2.5),
    RouterConfig(score="sqrt_softplus", factor=1.5),
    RouterConfig(score="sigmoid", factor=1.1, normalize=False),
]


def selected(
    logits: Tensor,
    weights: RouterTensors,
    top_k: int,
    numerics: Numerics,
    tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    ids = torch.full((len(logits), top_k), -9, dtype=torch.int32, device=DEVICE)
    out = torch.full((len(logits), top_k), -9.0, device=DEVICE)
    tokens = None if tokens is None else tokens.to(DEVICE)
    select(logits.to(DEVICE), weights.on(DEVICE), tokens, numerics, (ids, out))
    return ids.cpu(), out.cpu()


def compare(
    logits: Tensor,
    weights: RouterTensors,
    top_k: int,
    numerics: Numerics | None = None,
    tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    numerics = numerics or Numerics()
    found = selected(logits, weights, top_k, numerics, tokens)
    if weights.table is None:
        ids, scores = reference.select(logits, weights.bias, top_k, weights.config, numerics)
    else:
        assert tokens is not None
        ids, scores = reference.look_up(logits, weights.table, tokens, weights.config, numerics)
    assert_same_bits(found[0], ids)
    assert_same_bits(found[1], reference.routing_weights(scores, weights.config, numerics))
    return found


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("router", ["f32", "bf16_ladder"])
@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (5, 5), (257, 8)])
def test_scores(config, router, experts, top_k, rng):
    logits = torch.randn(2, experts, generator=rng) * 3
    bias = torch.randn(experts, generator=rng) * 0.1
    compare(logits, RouterTensors(None, bias, None, config), top_k, Numerics(router=router))
    compare(logits, RouterTensors(None, None, None, config), top_k, Numerics(router=router))


def test_the_most_experts_and_slots(rng):
    bias = torch.randn(1024, generator=rng)
    compare(torch.randn(1, 1024, generator=rng), RouterTensors(None, bias, None, CONFIGS[0]), 64)


@pytest.mark.parametrize("config", CONFIGS[:2])
def test_logits_of_every_size(config, rng):
    scales = torch.tensor([1e-45, 1e-30, 1e-3, 1.0, 30.0, 90.0, 700.0, 1e4, 1e30, 3e38])
    compare(
        torch.randn(10, 64, generator=rng) * scales[:, None],
        RouterTensors(None, None, None, config),
        6,
    )


def test_equal_keys_go_to_the_lower_id():
    logits = torch.zeros(2, 300)
    weights = RouterTensors(None, torch.full((300,), -0.5), None, CONFIGS[0])  # sigmoid(0) is 0.5
    weights.bias[1::2] -= 2.0**-40  # rounds away: every key is +0
    assert compare(logits, weights, 8)[0].tolist() == [list(range(8))] * 2
    keys = torch.full((1, 6), -INF)  # score 0; the bias is the key
    bias = torch.tensor([-0.0, 0.0, -1.0, -0.0, 0.0, 1.0])
    tied = RouterTensors(None, bias, None, CONFIGS[0])
    assert compare(keys, tied, 5)[0].tolist() == [[5, 0, 1, 3, 4]]
    tied.bias = torch.tensor([-1e-45, 0.0, -1.0, 1e-45, -1e-40, 1.0])  # -0 and +0 as bf16
    found = compare(keys, tied, 5, Numerics(router="bf16_ladder"))
    assert found[0].tolist() == [[5, 0, 1, 3, 4]]


def test_nan_keys_come_last_by_lower_id():
    bias = torch.tensor([NAN, -INF, NAN, 0.5, INF, -NAN])
    found = compare(torch.zeros(1, 6), RouterTensors(None, bias, None, CONFIGS[0]), 6)
    assert found[0].tolist() == [[4, 3, 1, 0, 2, 5]]
    logits = torch.tensor([[NAN, 1.0, INF, -INF], [0.0, 1.0, 2.0, 3.0]])
    found = compare(logits, RouterTensors(None, None, None, CONFIGS[1]), 4)
    assert found[0].tolist() == [[2, 1, 3, 0], [3, 2, 1, 0]]
    assert found[1].isnan().tolist() == [[True] * 4, [False] * 4]


@pytest.mark.parametrize("config", CONFIGS)
def test_hash_layers_take_the_tables_ids_even_repeated(config, rng):
    table = torch.randint(0, 12, (30, 3), generator=rng)
    table[4] = 7
    tokens = torch.tensor([4, 0, 29, 4, 11])
    weights = RouterTensors(None, None, table, config)
    found = compare(torch.randn(5, 12, generator=rng), weights, 3, None, tokens)
    assert found[0].tolist() == table[tokens].tolist()


@pytest.mark.parametrize("wrong", [-1, 30, 2**40, -(2**63), 2**63 - 1])
def test_an_id_outside_the_table_or_of_no_expert_is_absent(wrong, rng):
    """As on the CPU: id E, which the route table reports, weight 0, and nothing else changes."""
    table = torch.randint(0, 12, (32, 3), generator=rng)[1:31]  # ids before it and after it
    weights = RouterTensors(None, None, table, CONFIGS[0])
    logits = torch.randn(4, 12, generator=rng)
    tokens = torch.tensor([4, 0, 29, 11])
    before = compare(logits, weights, 3, None, tokens)
    after = selected(logits, weights, 3, Numerics(), torch.tensor([4, wrong, 29, 11]))
    assert after[0][1].tolist() == [12] * 3 and after[1][1].tolist() == [0.0] * 3
    for a, b in zip(after, before, strict=True):
        assert_same_bits(a[[0, 2, 3]], b[[0, 2, 3]])
    table[0, 1] = wrong
    ids, values = selected(logits, weights, 3, Numerics(), tokens)
    assert ids[1].tolist() == [int(table[0, 0]), 12, int(table[0, 2])]
    assert values[1, 1] == 0.0 and bool((values[1, [0, 2]] > 0).all())


def all_logits(x: Tensor, weight: Tensor, narrow: bool) -> Tensor:
    """Logits of a call by either way; the narrow way's tree is in `select`."""
    experts = len(weight)
    logits = torch.full((len(x), experts), NAN, device=DEVICE)
    parts = torch.full((16, len(x) + 3, experts), NAN, device=DEVICE)[:, : len(x)]
    routed = (
        torch.empty(len(x), 1, dtype=torch.int32, device=DEVICE),
        torch.empty(len(x), 1, device=DEVICE),
    )
    weights = RouterTensors(weight, None, None, CONFIGS[0]).on(DEVICE)
    router(x.to(DEVICE), weights, None, Numerics(), logits, routed, parts if narrow else None)
    return logits.cpu()


@pytest.mark.parametrize(("tokens", "experts", "hidden"), [(9, 18, 96), (1, 5, 528), (3, 16, 16)])
def test_f32_weights_have_the_references_bytes(tokens, experts, hidden, rng):
    x = torch.randn(tokens, hidden, generator=rng).bfloat16()
    weight = torch.randn(experts, hidden, generator=rng)
    expected = reference.router_logits(x, weight)
    assert_same_bits(all_logits(x, weight, narrow=True), expected)
    assert_same_bits(all_logits(x, weight, narrow=False), expected)


@pytest.mark.parametrize(
    ("tokens", "experts", "hidden"), [(3, 70, 96), (17, 5, 1024), (2, 65, 2064), (1, 64, 16)]
)
def test_bf16_weights_on_matrix_units(tokens, experts, hidden, rng):
    """Both ways have the same bits on a card; the interpreter's dots are a BLAS's."""
    x = torch.randn(tokens, hidden, generator=rng).bfloat16()
    weight = torch.randn(experts, hidden, generator=rng).bfloat16()
    narrow, wide = all_logits(x, weight, narrow=True), all_logits(x, weight, narrow=False)
    truth = x.double() @ weight.double().T
    for found in (narrow, wide):
        assert (found - truth).norm() <= 2.0**-17 * truth.norm()
    if not INTERPRETED:
        assert_same_bits(narrow, wide)


def test_exact_sums_on_matrix_units(rng):
    """Whole numbers: no order of the sums matters, so every element must be right."""
    x, weight = (torch.randint(-8, 9, (n, 1040), generator=rng).bfloat16() for n in (5, 66))
    for narrow in (True, False):
        assert_same_bits(all_logits(x, weight, narrow), x.float() @ weight.float().T)


@pytest.mark.parametrize("narrow", [True, False])
def test_each_segment_starts_anew_and_the_tree_is_binary(narrow, rng):
    """Sums whose value tells the order: 2^24 + 1 loses the 1, and one after the other would give
    2^24 and 0.
    """
    hidden = 16 * 32
    weight = torch.zeros(2, hidden).bfloat16()
    first = torch.arange(16) * 32
    weight[0, first[:4]] = torch.tensor([2.0**24, 1.0, 1.0, 1.0]).bfloat16()
    weight[1, first[4:8]] = torch.tensor([1.0, 2.0**24, 1.0, -(2.0**24)]).bfloat16()
    logits = all_logits(torch.ones(1, hidden).bfloat16(), weight, narrow)
    assert logits.tolist() == [[2.0**24 + 2, 1.0]]


def test_nan_and_inf_stay_with_their_token(rng):
    x = torch.randn(6, 64, generator=rng).bfloat16()
    weight = torch.randn(16, 64, generator=rng).bfloat16()
    clean = all_logits(x, weight, narrow=True)
    x[3, 5], x[1, 63] = NAN, INF
    others = [0, 2, 4, 5]
    assert_same_bits(all_logits(x, weight, narrow=True)[others], clean[others])


@pytest.mark.parametrize("narrow", [True, False])
@pytest.mark.parametrize("hashed", [True, False])
def test_a_whole_call(hashed, narrow, rng):
    """The ids and weights of a call are those of its own logits."""
    x = torch.randn(3, 256, generator=rng).bfloat16()
    weight = (torch.randn(40, 256, generator=rng) / 16).bfloat16()
    bias = None if hashed else torch.randn(40, generator=rng) * 0.1
    table = torch.randint(0, 40, (9, 4), generator=rng) if hashed else None
    tokens = torch.tensor([3, 8, 0]) if hashed else None
    weights = RouterTensors(weight, bias, table, CONFIGS[0])
    logits = torch.empty(3, 40, device=DEVICE)
    ids = torch.empty(3, 4, dtype=torch.int32, device=DEVICE)
    out = torch.empty(3, 4, device=DEVICE)
    parts = torch.empty(16, 3, 40, device=DEVICE) if narrow else None
    given = None if tokens is None else tokens.to(DEVICE)
    router(x.to(DEVICE), weights.on(DEVICE), given, Numerics(), logits, (ids, out), parts)
    found = compare(logits.cpu(), weights, 4, None, tokens)
    assert_same_bits(ids.cpu(), found[0])
    assert_same_bits(out.cpu(), found[1])
    truth = x.double() @ weight.double().T
    assert (logits.cpu() - truth).norm() <= 2.0**-17 * truth.norm()
