"""Field faults with several cards, by their right values: A10 to A13, A24."""

import itertools

import pytest
import torch

from card_layers import on_cards, ways
from exactmoe import DenseMLP, ExpertBank, Limits, MoELayer, Router, RouterConfig
from exactmoe.bank import Partition
from exactmoe.errors import ConfigError
from layers import (
    CLASSES,
    assert_same_bits,
    first_column,
    layer_of,
    normal,
    random_bank,
    random_call,
    switch_bank,
    true_values,
)

BIG = 2.0**24


def powers_layer(num_experts: int, top_k: int, size: int = 128, **settings) -> MoELayer:
    """Expert e gives 2^e in every element for x = (1, 0, ...): a sum says who was in it."""
    up = torch.zeros(num_experts, size)
    up[:, 0] = 1.0
    down = torch.zeros(num_experts, size, size)
    down[:, :, 0] = 1.0
    bank = switch_bank("mxfp4", up, down, [e - 5 for e in range(num_experts)])
    return layer_of(bank, top_k, "cpu", **settings)


def partitions(num_experts: int) -> list[Partition]:
    """Even over 2 and 3 cards, the halves exchanged, odd ids apart from even ones, one alone."""
    odd = Partition(tuple(e % 2 for e in range(num_experts)))
    lonely = Partition(tuple(int(e > 0) for e in range(num_experts)))
    even = [Partition.even(num_experts, cards) for cards in (2, 3)]
    return [*even, Partition.halves(num_experts, 1), odd, lonely]


@pytest.mark.parametrize(
    ("format", "inner", "cards"), [("nvfp4", 1856, 8), ("mxfp4", 2880, 4), ("mxfp4", 2880, 8)]
)
def test_a10_no_card_cuts_through_a_quantisation_group(rng, format, inner, cards):
    """I / cards would be 232 or 360, no multiple of a block. Experts are cut whole, so every card
    holds its experts' values exactly, and the sum is the one of one card.
    """
    layer = layer_of(random_bank(rng, format, 8, 64, inner), 3, "cpu")
    several = on_cards(layer, Partition.even(8, cards))
    for card, bank in enumerate(several.bank):
        owned = list(several.cards.partition.experts[card])
        for name in ("gate", "up", "down"):
            found = true_values(bank.packed(name))
            assert torch.equal(found, true_values(layer.bank.packed(name))[owned])
    x, ids, weights = random_call(rng, layer, 4)
    assert_same_bits(several.experts(x, ids, weights), layer.experts(x, ids, weights))


@pytest.mark.parametrize("inner", [1856, 704])
def test_a10_the_shared_expert_of_such_a_size(rng, inner):
    shared = DenseMLP(
        *(normal(rng, *s, scale=0.1) for s in ((inner, 64), (inner, 64), (64, inner)))
    )
    router = Router(normal(rng, 8, 64), config=RouterConfig(score="sigmoid"))
    layer = layer_of(random_bank(rng, "nvfp4", 8, 64, 64), 2, "cpu", router=router, shared=shared)
    x = normal(rng, 5, 64)
    assert_same_bits(on_cards(layer, Partition.even(8, 2))(x), layer(x))


def exact_shared(value: float, size: int = 128) -> DenseMLP:
    """Gives `value` in every element for x = (1, 0, ...): 32 x 32 x (value / 1024)."""
    one, third = torch.zeros(16, size), torch.zeros(size, 16)
    one[0, 0], third[:, 0] = 32.0, value / 1024
    return DenseMLP(one.bfloat16(), one.bfloat16(), third.bfloat16(), backend="cpu")


def selecting_router(ids: tuple[int, ...], num_experts: int, size: int = 128) -> Router:
    """x = (1, 0, ...) chooses these experts, each with weight 0.5: sigmoid(0) after the bias."""
    bias = torch.zeros(num_experts)
    bias[list(ids)] = 1.0
    return Router(
        torch.zeros(num_experts, size).bfloat16(),
        bias=bias,
        config=RouterConfig(score="sigmoid", normalize=False),
    )


@pytest.mark.parametrize("numerics", CLASSES)
@pytest.mark.parametrize(
    ("routed", "shared", "expected"),
    [(0.0, 96.0, 96.0), (1.0, 0.0, 0.5 + 64.0), (1.0, 96.0, 160.5)],
)
def test_a11_the_shared_expert_is_added_once(routed, shared, expected, numerics):
    """Experts 0 and 7 give 2^0 and 2^7 with weight 0.5, or zero; they are on different cards."""
    for partition in partitions(8):
        layer = powers_layer(
            8,
            2,
            numerics=numerics,
            router=selecting_router((0, 7), 8),
            shared=exact_shared(shared),
        )
        if routed == 0.0:
            gate, up, down = layer.bank.gate, layer.bank.up, layer.bank.down
            down.codes.zero_()
            layer = layer_of(
                ExpertBank(gate, up, down),
                2,
                "cpu",
                numerics=numerics,
                router=layer.router,
                shared=layer.shared,
            )
        wanted = torch.full((3, 128), expected).bfloat16()
        assert_same_bits(layer(first_column(3, 128)), wanted)
        for returns in ways(partition):
            found = on_cards(layer, partition, returns)(first_column(3, 128))
            assert_same_bits(found, wanted, f"{partition.rule} {returns}")


A12 = {
    (288, 2): (144, 144),
    (288, 3): (96, 96, 96),
    (288, 5): (58, 58, 58, 57, 57),
    (288, 6): (48,) * 6,
    (288, 8): (36,) * 8,
    (256, 3): (86, 85, 85),
    (256, 5): (52, 51, 51, 51, 51),
    (256, 6): (43, 43, 43, 43, 42, 42),
}


@pytest.mark.parametrize("numerics", CLASSES)
def test_a12_experts_that_the_cards_do_not_divide(rng, numerics):
    assert {key: Partition.even(*key).counts for key in A12} == A12
    layer = layer_of(random_bank(rng, "mxfp4", 288, 128, 128), 8, "cpu", numerics=numerics)
    x, ids, weights = random_call(rng, layer, 5)
    expected = layer.experts(x, ids, weights)
    for cards in (2, 3, 5, 6, 8):
        partition = Partition.even(288, cards)
        for returns in ways(partition):
            found = on_cards(layer, partition, returns).experts(x, ids, weights)
            assert_same_bits(found, expected, f"{cards} {returns}")
    odd = Partition(tuple(1 - e % 2 for e in range(288)))  # card 1 owns all even ids
    assert_same_bits(on_cards(layer, odd).experts(x, ids, weights), expected)


@pytest.mark.parametrize("numerics", CLASSES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a13_ids_that_are_negative_of_others_or_twice(dtype, numerics):
    layer = powers_layer(8, 2, numerics=numerics)
    ids = torch.tensor([[0, 7], [-1, 3], [-1, -1], [4, 4], [7, -1], [-2, 5], [-(2**31), 6]])
    weights = torch.tensor([[1.0, 1.0]] * 3 + [[1.0, 0.5]] + [[1.0, 1.0]] * 3)
    values = torch.tensor([1 + 128, 8, 0, 16 + 8, 128, 32, 64.0]).bfloat16()
    for partition in partitions(8):
        for returns in ways(partition):
            cards = on_cards(layer, partition, returns)
            y = cards.experts(first_column(7, 128), ids.to(dtype), weights)
            assert_same_bits(y, values[:, None].expand(7, 128), f"{partition.rule} {returns}")


@pytest.mark.parametrize("bad", [8, 1000, 2**31 - 1, 2**32 + 3])
def test_a13_an_id_out_of_range_is_absent_everywhere_and_said(bad):
    layer = powers_layer(8, 2)
    ids = torch.tensor([[bad, 3], [7, bad], [1, 2]])
    wanted = torch.tensor([8, 128, 6.0]).bfloat16()[:, None].expand(3, 128)
    for partition in partitions(8):
        for returns in ways(partition):
            cards = on_cards(layer, partition, returns, limits=Limits())
            assert_same_bits(cards.experts(first_column(3, 128), ids, torch.ones(3, 2)), wanted)
            with pytest.raises(ConfigError, match="an expert id was >= num_experts = 8"):
                cards.check()
            cards.experts(first_column(1, 128), ids[2:], torch.ones(1, 2))
            cards.check()


# Ids of the outputs (BIG, 1, -BIG, 1), E, and the sum by the group tree, by hand.
A24 = [
    ((0, 1, 2, 3), 32, 1.0),  # one group: ((BIG + 1) - BIG) + 1
    ((1, 2, 0, 3), 32, 2.0),  # ((-BIG + BIG) + 1) + 1
    ((0, 1, 3, 2), 32, 0.0),  # ((BIG + 1) + 1) - BIG
    ((0, 1, 2, 3), 8, 1.0),  # groups 0 to 3: (BIG + 1) + (-BIG + 1)
    ((0, 2, 1, 3), 8, 2.0),  # (BIG - BIG) + (1 + 1)
    ((0, 4, 1, 5), 8, 2.0),  # (BIG - BIG) on the left, (1 + 1) on the right
    ((0, 1, 4, 5), 8, 1.0),  # (BIG + 1) on the left, (1 - BIG) on the right: BIG - 16777215
    ((4, 5, 6, 7), 9, 2.0),  # groups 3, 4, 5, 6: BIG + ((1 - BIG) + (1 + 0)) = BIG - 16777214
]


@pytest.mark.parametrize("numerics", CLASSES)
@pytest.mark.parametrize("case", A24)
def test_a24_the_sum_is_the_group_tree_for_every_placement(case, numerics):
    """A card that added all it owns would be wrong where its experts are not one subtree."""
    ids, num_experts, expected = case
    size = 128
    up, down = torch.zeros(num_experts, size), torch.zeros(num_experts, size, size)
    up[:, 0] = 1.0
    powers = [0] * num_experts
    for expert, value in zip(ids, (BIG, 1.0, -BIG, 1.0), strict=True):
        down[expert, :, 0] = 1.0 if value > 0 else -1.0
        powers[expert] = 19 if abs(value) == BIG else -5  # times h = 32
    layer = layer_of(switch_bank("mxfp4", up, down, powers), 4, "cpu", numerics=numerics)
    wanted = torch.full((1, size), expected).bfloat16()
    placements = partitions(num_experts)
    # Every way to put the four experts on two cards; all others are on card 0 or 1.
    for bits in itertools.product((0, 1), repeat=4):
        owners = [1 - bits[0]] * num_experts
        for expert, card in zip(ids, bits, strict=True):
            owners[expert] = card
        if len(set(owners)) == 2:
            placements.append(Partition(tuple(owners)))
    for partition in placements:
        for returns in ways(partition):
            cards = on_cards(layer, partition, returns)
            for order in (ids, ids[::-1], (ids[2], ids[0], ids[3], ids[1])):
                y = cards.experts(first_column(1, size), torch.tensor([order]), torch.ones(1, 4))
                assert_same_bits(y, wanted, f"{partition} {returns}")


def test_a24_200_repeats(rng):
    layer = layer_of(random_bank(rng, "nvfp4", 8, 64, 64), 4, "cpu")
    x, ids, weights = random_call(rng, layer, 3)
    expected = layer.experts(x, ids, weights)
    for partition in partitions(8)[:4]:
        for returns in ways(partition):
            cards = on_cards(layer, partition, returns)
            for _ in range(50):
                assert_same_bits(cards.experts(x, ids, weights), expected)
