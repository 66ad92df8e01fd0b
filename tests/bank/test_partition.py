"""Who owns which expert: counts, alignment, refusals, and the text that is printed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exactmoe.bank import Partition
from exactmoe.bank.partition import group_of
from exactmoe.errors import ConfigError

EVEN = [
    (288, 2, (144, 144)),
    (288, 3, (96, 96, 96)),
    (288, 5, (58, 58, 58, 57, 57)),
    (288, 8, (36,) * 8),
    (256, 3, (86, 85, 85)),
    (256, 6, (43, 43, 43, 43, 42, 42)),
    (257, 2, (129, 128)),
    (258, 4, (65, 64, 65, 64)),  # at ceil(258 r / 4): 65, 129, 194
    (9, 8, (2, 1, 1, 1, 1, 1, 1, 1)),
    (1, 1, (1,)),
]


@pytest.mark.parametrize(("num_experts", "num_cards", "counts"), EVEN)
def test_even(num_experts, num_cards, counts):
    partition = Partition.even(num_experts, num_cards)
    assert partition.counts == counts
    assert sum(partition.experts, ()) == tuple(range(num_experts))  # consecutive


@pytest.mark.parametrize("num_cards", [1, 2, 4, 8])
def test_even_of_1_2_4_8_cards_is_one_subtree_each(num_cards):
    for num_experts in (*range(num_cards, 70), 255, 256, 257, 288, 1024):
        partition = Partition.even(num_experts, num_cards)
        groups = 8 // num_cards
        for card, owned in enumerate(partition.experts):
            found = {group_of(expert, num_experts) // groups for expert in owned}
            assert found == {card}
        if num_experts >= 8:  # with fewer some groups are empty, and a smaller subtree will do
            wanted = tuple(((card * groups, groups),) for card in range(num_cards))
            assert partition.subtrees == wanted


def test_halves():
    assert Partition.halves(5).owners == (0, 0, 0, 1, 1)
    assert Partition.halves(5, first=1).owners == (1, 1, 1, 0, 0)
    assert Partition.halves(8, first=1).subtrees == (((4, 4),), ((0, 4),))


def test_subtrees_of_an_explicit_map():
    # Groups of 16 experts are pairs; card 0 owns groups 0, 1, 2, 5, card 1 the others.
    pairs = (0, 0, 0, 1, 1, 0, 1, 1)
    partition = Partition(tuple(card for card in pairs for _ in range(2)))
    assert partition.subtrees == (((0, 2), (2, 1), (5, 1)), ((3, 1), (4, 1), (6, 2)))
    broken = Partition((0, 1, *partition.owners[2:]))
    assert broken.subtrees is None
    assert broken.shared_groups == (0,)
    # 4 experts are groups 0, 2, 4, 6: the empty ones between them are +0 and anybody's.
    assert Partition((0, 0, 1, 0)).subtrees == (((0, 4), (6, 2)), ((4, 2),))


@given(st.data(), st.integers(1, 40))
def test_total_disjoint_and_pure(data, num_experts):
    num_cards = data.draw(st.integers(1, min(num_experts, 9)))
    rest = st.lists(
        st.integers(0, num_cards - 1),
        min_size=num_experts - num_cards,
        max_size=num_experts - num_cards,
    )
    owners = data.draw(st.permutations([*range(num_cards), *data.draw(rest)]))
    partition = Partition(tuple(owners))
    assert sorted(sum(partition.experts, ())) == list(range(num_experts))
    assert Partition.of_lists(partition.experts, num_experts) == partition
    assert hash(Partition(tuple(owners))) == hash(partition)
    if partition.subtrees is not None:
        covered = {g for trees in partition.subtrees for f, n in trees for g in range(f, f + n)}
        assert covered >= {group_of(expert, num_experts) for expert in range(num_experts)}
        for card, trees in enumerate(partition.subtrees):
            for first, groups in trees:
                assert first % groups == 0
                inside = [
                    e
                    for e in range(num_experts)
                    if first <= group_of(e, num_experts) < first + groups
                ]
                assert {partition.owners[e] for e in inside} == {card}


def test_text():
    assert str(Partition.of_lists([[0, 1, 4], [2, 3]], 5)) == (
        "explicit map; card 0: 3 experts (0-1, 4); card 1: 2 experts (2-3)"
    )


REFUSED = [
    (lambda: Partition(()), "owners are ()"),
    (lambda: Partition((0, -1)), "owner of expert 1 is -1; allowed: a card's number, from 0"),
    (lambda: Partition((0, True)), "owner of expert 1 is True"),
    (lambda: Partition((0, 2)), "cards [1] of 3 own no expert"),
    (lambda: Partition.of_lists([[0, 1], [1, 2]], 3), "expert 1 is owned by card 0 and again by"),
    (lambda: Partition.of_lists([[0.0]], 1), "card 0 owns expert 0.0; allowed: 0 to 0"),
    (
        lambda: Partition.of_lists([[0, 0], [1]], 2),
        "expert 0 is owned by card 0 and again by card 0",
    ),
    (lambda: Partition.of_lists([[0], [4]], 8), "experts 1-3, 5-7 of 8 have no owner"),
    (lambda: Partition.of_lists([[0, 8], [1]], 8), "card 0 owns expert 8; allowed: 0 to 7"),
    (lambda: Partition.of_lists([[0, 1], []], 2), "card 1 owns no expert"),
    (lambda: Partition.even(4, 5), "num_cards is 5 for 4 experts; allowed: 1 to 4"),
    (lambda: Partition.even(4, 0), "num_cards is 0; allowed: an integer from 1"),
    (lambda: Partition.halves(4, 2), "first is 2; allowed: 0, 1"),
    (lambda: Partition.even(8, 2).require(9, 2), "of (8, 2) (experts, cards); the layer asks"),
    (lambda: Partition.even(8, 2).require(8, 3), "the layer asks for (8, 3)"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_refused(make, message):
    with pytest.raises(ConfigError) as caught:
        make()
    assert message in str(caught.value)
