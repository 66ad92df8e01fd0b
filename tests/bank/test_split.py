"""A resident bank to several cards: every byte arrives, nothing is released before that."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exactmoe import ExpertBank, PackedWeight, quantize_experts
from exactmoe.bank import Partition, SplitBank
from exactmoe.bank import split as splitting
from exactmoe.errors import BitMismatch, ConfigError
from layers import assert_same_bits, fp8_blocks, random_bank

PARTS = ("codes", "scales", "global_scale")
EXPERTS = 6


def byte_bank(format: str, experts: int = EXPERTS) -> ExpertBank:
    """Bytes that differ by expert, projection and part, without a short period."""
    if format == "bf16":
        values = torch.arange(experts * 32 * 32).reshape(experts, 32, 32).sin().bfloat16()
        return ExpertBank(*(PackedWeight("bf16", values * (k + 1)) for k in range(3)))
    if format == "fp8":
        rng = torch.Generator().manual_seed(3)
        return ExpertBank(
            *(fp8_blocks(torch.randn(experts, 128, 128, generator=rng)) for _ in "gud")
        )
    return random_bank(torch.Generator().manual_seed(3), format, experts, 64, 32)


def parts_of(weight: PackedWeight) -> dict[str, torch.Tensor]:
    found = {part: getattr(weight, part) for part in PARTS}
    return {part: tensor.clone() for part, tensor in found.items() if tensor is not None}


def whole(bank) -> dict[str, dict[str, torch.Tensor]]:
    return {name: parts_of(bank.packed(name)) for name in ("gate", "up", "down")}


def assert_split(split: SplitBank, before, partition: Partition) -> None:
    for card, bank in enumerate(split):
        for name, parts in whole(bank).items():
            assert set(parts) == set(before[name])
            for part, found in parts.items():
                expected = before[name][part][list(partition.experts[card])]
                assert_same_bits(found, expected, f"card {card} {name} {part}")


@pytest.mark.parametrize(
    ("format", "piece_bytes"),
    [("mxfp4", 1), *((format, 1 << 26) for format in ("nvfp4", "mxfp4", "bf16", "fp8"))],
)
def test_bytes_of_every_part(format, piece_bytes):
    bank = byte_bank(format, 3 if piece_bytes == 1 else EXPERTS)
    before, nbytes = whole(bank), bank.nbytes
    experts = bank.num_experts
    lists = [[0, 2], [1]] if experts == 3 else [[5, 0, 1], [2, 4], [3]]
    partition = Partition.of_lists(lists, experts)
    cards = ["cpu"] * partition.num_cards
    split = splitting.split(bank, partition, cards, keep=True, piece_bytes=piece_bytes)
    assert_split(split, before, partition)
    assert split.nbytes == nbytes
    assert split.formats == bank.formats
    assert split.shapes == bank.shapes
    joined = split.join()
    for name, parts in before.items():
        for part, expected in parts.items():
            assert_same_bits(whole(joined)[name][part], expected)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=EXPERTS, max_size=EXPERTS), st.integers(20, 3000))
def test_any_partition(owners, piece_bytes):
    numbers = sorted(set(owners))
    partition = Partition(tuple(numbers.index(owner) for owner in owners))
    bank = byte_bank("nvfp4")
    before = whole(bank)
    cards = ["cpu"] * partition.num_cards
    assert_split(
        splitting.split(bank, partition, cards, keep=True, piece_bytes=piece_bytes),
        before,
        partition,
    )


def test_global_scales_keep_their_operation():
    bank = byte_bank("nvfp4")
    weights = [
        PackedWeight("nvfp4", w.codes, w.scales, w.global_scale, "divide") for w in bank.weights()
    ]
    split = ExpertBank(*weights).split(Partition.even(EXPERTS, 2), ["cpu", "cpu"])
    assert [w.global_scale_op for w in split[1].weights()] == ["divide"] * 3


def test_views_of_a_model_are_split_too(rng):
    """gate and up may be rows of one tensor, as in a transformers model."""
    both, down = (torch.randn(4, 64, 32, generator=rng).bfloat16() for _ in range(2))
    down = down.view(4, 32, 64)[..., :32].contiguous()
    gate, up = (PackedWeight("bf16", both[:, rows]) for rows in (slice(32), slice(32, 64)))
    bank = ExpertBank(gate, up, PackedWeight("bf16", down))
    split = bank.split(Partition.even(4, 2), ["cpu", "cpu"], keep=True)
    assert_same_bits(split[1].up.codes, both[2:, 32:])
    assert_same_bits(split.gate.codes, both[:, :32])


def test_fragment_order_is_split_in_canonical_order(rng):
    bank = random_bank(rng, "nvfp4", 2, 128, 128)
    before = whole(bank)
    bank.arrange("fragment")
    assert_split(bank.split(Partition.even(2, 2), ["cpu", "cpu"]), before, Partition.even(2, 2))


def test_the_bank_is_released_after_the_comparison():
    bank = byte_bank("nvfp4")
    memory = bank.gate_codes.untyped_storage()
    split = bank.split(Partition.even(EXPERTS, 2), ["cpu", "cpu"])
    addresses = {part.untyped_storage().data_ptr() for part in split.buffers()}
    assert memory.data_ptr() not in addresses
    assert list(bank.buffers()) == []
    assert repr(bank) == "ExpertBank(released)"
    for read in (lambda: bank.gate, lambda: bank.num_experts, lambda: bank.device):
        with pytest.raises(ConfigError, match="was released, its experts were split over cards"):
            read()
    with pytest.raises(ConfigError, match="was released"):
        bank.split(Partition.even(EXPERTS, 2), ["cpu", "cpu"])


@pytest.mark.parametrize("card", [0, 1])
def test_a_byte_that_does_not_arrive_is_named_and_nothing_is_released(monkeypatch, card):
    """The 5th piece of up's codes is broken on one card."""
    bank = byte_bank("mxfp4")
    before, copied = whole(bank), splitting.copy_piece
    seen = []

    def faulty(source, target):
        copied(source, target)
        seen.append(len(source))
        if len(seen) == broken:
            target[3] ^= 0x10

    monkeypatch.setattr(splitting, "copy_piece", faulty)
    # gate: codes 3 x 1024 bytes and scales 3 x 64 a card; in pieces of 512: 6 + 1 a card, then up.
    broken = 14 + 5 + 7 * card
    partition = Partition.even(EXPERTS, 2)
    with pytest.raises(BitMismatch) as caught:
        splitting.split(bank, partition, ["cpu", "cpu"], piece_bytes=512)
    assert (
        f"up codes of card {card}: the piece of bytes 2048 to 2559 differs first at byte 2051"
        in (str(caught.value))
    )
    assert "nothing was released" in str(caught.value)
    for name, parts in before.items():
        for part, expected in parts.items():
            assert_same_bits(whole(bank)[name][part], expected)


def test_a_piece_that_is_not_copied_is_found(monkeypatch):
    monkeypatch.setattr(splitting, "copy_piece", lambda source, target: target.fill_(0xA5))
    bank = byte_bank("nvfp4")
    with pytest.raises(BitMismatch, match="gate codes of card 0: the piece of bytes 0 to "):
        bank.split(Partition.even(EXPERTS, 2), ["cpu", "cpu"])
    assert bank.num_experts == EXPERTS


@pytest.mark.parametrize(
    ("first", "count", "stride", "available", "message"),
    [
        (1, 2, 10, 29, "experts 1 to 2 end at byte 30; there are 29"),
        (0, 2**40, 2**30, 100, "pass 64-bit addresses"),
        (2**60, 1, 2**10, 100, "pass 64-bit addresses"),
        (2**62, 1, 2, 100, "pass 64-bit addresses"),
        (-1, 1, 2, 100, "pass 64-bit addresses"),
    ],
)
def test_bounds(first, count, stride, available, message):
    with pytest.raises(ConfigError, match=f"a part: .*{message}"):
        splitting.within(first, count, stride, available, "a part")
    assert splitting.within(2, 3, 10, 50, "a part") == 20


def test_refused():
    bank = byte_bank("nvfp4")
    for partition, cards in (
        (Partition.even(EXPERTS + 1, 2), 2),
        (Partition.even(EXPERTS, 2), 3),
        (Partition.even(EXPERTS, 3), 2),
    ):
        with pytest.raises(ConfigError, match="the partition is of"):
            bank.split(partition, ["cpu"] * cards)
    with pytest.raises(ConfigError, match="piece_bytes is 0"):
        splitting.split(bank, Partition.even(EXPERTS, 2), ["cpu", "cpu"], piece_bytes=0)
    assert bank.num_experts == EXPERTS
    split = bank.split(Partition.even(EXPERTS, 2), ["cpu", "cpu"])
    with pytest.raises(ConfigError, match=r"the banks hold \(3, 3\) experts; the partition .*4, 2"):
        SplitBank(list(split), Partition((0, 0, 0, 0, 1, 1)))
    other = quantize_experts(*(torch.ones(3, 64, 64) for _ in range(3)), "nvfp4")
    with pytest.raises(ConfigError, match="the bank of card 1 is .*; card 0 asks for"):
        SplitBank([split[0], other], split.partition)


def test_over_the_same_memory():
    bank = byte_bank("nvfp4")
    before, partition = whole(bank), Partition.halves(EXPERTS, 1)
    shared = splitting.over(bank, partition)
    assert_split(shared, before, partition)
    assert shared[0].gate_codes.untyped_storage().data_ptr() == bank.gate_codes.data_ptr()
    assert shared.fixed_order  # one card may not rearrange what is the other's too
    with pytest.raises(ConfigError, match="the experts of card 0 are not consecutive"):
        splitting.over(bank, Partition((0, 1, 0, 1, 1, 1)))
    with pytest.raises(ConfigError, match="the partition is of"):
        splitting.over(bank, Partition.even(EXPERTS + 1, 2))


def test_state_dict_pickle_and_copy():
    split = byte_bank("nvfp4").split(Partition.even(EXPERTS, 2), ["cpu", "cpu"])
    before = whole(split)
    for other in (copy.deepcopy(split), pickle.loads(pickle.dumps(split))):
        assert other.partition == split.partition
        for name, parts in before.items():
            for part, expected in parts.items():
                assert_same_bits(whole(other)[name][part], expected)
    state = split.state_dict()
    assert "banks.1.gate_codes" in state
    other = byte_bank("nvfp4").split(Partition.even(EXPERTS, 2), ["cpu", "cpu"])
    other[1].gate_codes.zero_()
    other.load_state_dict(state)
    assert_same_bits(other.gate.codes, before["gate"]["codes"])
