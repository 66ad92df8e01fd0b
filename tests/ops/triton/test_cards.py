"""What several cards add: the kernels against plain torch, byte by byte."""

import pytest
import torch

from exactmoe.errors import ConfigError
from exactmoe.ops.cards import TorchCards
from exactmoe.ops.cpu_path import CpuPath
from exactmoe.ops.triton.cards import TritonCards
from layers import assert_same_bits
from triton_device import DEVICE

OURS, TORCH = TritonCards(), TorchCards(CpuPath.combine)
NAN_WORD = 0x7FC54321


def poisoned(*shape: int, dtype=torch.float32) -> torch.Tensor:
    values = torch.empty(*shape, dtype=dtype, device=DEVICE)
    words = values.view(torch.int32) if values.element_size() != 8 else values
    words.fill_(NAN_WORD)
    return values


@pytest.mark.parametrize("slots", [1, 6, 1025])
def test_look_up(rng, slots):
    tables = torch.randint(-1, 99, (3, 10), generator=rng, dtype=torch.int32)
    ids = torch.randint(-3, 11, (slots,), generator=rng, dtype=torch.int32)
    ids[0] = -(2**31)
    ids[-1] = 2**31 - 1 if slots > 1 else ids[-1]
    room = poisoned(3 * slots + 8, dtype=torch.int32)
    OURS.look_up(ids.to(DEVICE), tables.to(DEVICE), room[: 3 * slots].view(3, slots))
    wanted = torch.empty(3, slots, dtype=torch.int32)
    TORCH.look_up(ids, tables, wanted)
    assert torch.equal(room[: 3 * slots].view(3, slots).cpu(), wanted)
    assert bool((room[3 * slots :] == NAN_WORD).all())
    for table, row in zip(tables, wanted, strict=True):
        for id, value in zip(ids.tolist(), row.tolist(), strict=True):
            assert value == int(table[min(max(id, -1), 8) + 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden", [16, 96, 2064])
def test_take_slots(rng, dtype, hidden):
    """Raw words: NaN payloads and -0 too; slots of other cards keep theirs."""
    owners = torch.tensor([0, 1, 2, 1, -1, 1], dtype=torch.int32)
    words = [
        torch.randint(-(2**31), 2**31, (6, hidden * dtype.itemsize // 4), generator=rng).int()
        for _ in range(2)
    ]
    slots, returned = (w.to(DEVICE).view(dtype) for w in words)
    OURS.take_slots(owners.to(DEVICE), 1, returned, slots)
    wanted = torch.where((owners == 1)[:, None], words[1], words[0])
    assert torch.equal(slots.view(torch.int32).cpu(), wanted)
    kept, given = (w.view(dtype).clone() for w in words)
    TORCH.take_slots(owners, 1, given, kept)
    assert torch.equal(kept.view(torch.int32), wanted)


@pytest.mark.parametrize("slots", [1, 48, 5000])
@pytest.mark.parametrize("peers", [1, 3])
def test_count_served(rng, slots, peers):
    owners = torch.randint(-1, peers + 1, (slots,), generator=rng, dtype=torch.int32)
    counts = [int((owners == card).sum()) for card in range(peers + 1)]
    for wrong in (0, 2, -1):
        for ops, device in ((OURS, DEVICE), (TORCH, "cpu")):
            lost = torch.tensor([5], device=device)
            own = torch.tensor([counts[0] + wrong], dtype=torch.int32, device=device)
            served = torch.tensor(counts[1:], dtype=torch.int32, device=device)
            ops.count_served(owners.to(device), own, served, lost)
            assert int(lost) == 5 + abs(wrong)


FIRSTS = [(0, 4), (0, 2, 4, 6), (0, 3, 4), (1, 2, 5, 7), tuple(range(8)), (0,)]


@pytest.mark.parametrize("firsts", FIRSTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_combine_partials(rng, firsts, dtype):
    tokens, hidden, rows = 3, 80, 5
    values = torch.randn(len(firsts), rows, hidden, generator=rng) * 1e3
    values[0, 1, 7], values[-1, 2, 8] = float("nan"), float("inf")
    shared = torch.randn(tokens, hidden, generator=rng)
    vectors = values[:, :tokens]  # the workspace holds more rows than a piece may have
    for given in (shared, None):
        wanted = torch.empty(tokens, hidden, dtype=dtype)
        TORCH.combine_partials(vectors, firsts, given, wanted)
        y = poisoned(tokens, hidden, dtype=dtype)
        on_device = values.to(DEVICE)[:, :tokens]
        OURS.combine_partials(on_device, firsts, None if given is None else given.to(DEVICE), y)
        assert_same_bits(y.cpu(), wanted)
        groups = [torch.zeros(tokens, hidden)] * 8
        for first, vector in zip(firsts, vectors, strict=True):
            groups[first] = vector
        while len(groups) > 1:
            groups = [a + b for a, b in zip(groups[::2], groups[1::2], strict=True)]
        total = groups[0] + (0.0 if given is None else given)
        finite = torch.isfinite(total)
        assert torch.equal(y.cpu()[finite], total.to(dtype)[finite])


def test_carry(rng):
    sizes = (4, 24, 4100, 70000)
    for count in range(1, 5):
        sent = [torch.randint(0, 256, (n,), generator=rng).byte().to(DEVICE) for n in sizes[:count]]
        rooms = [torch.full((n + 16,), 0x5A, dtype=torch.uint8, device=DEVICE) for n in sizes]
        parts = [(s, room[: s.nbytes]) for s, room in zip(sent, rooms, strict=False)]
        words = torch.tensor([7, 8, 9], dtype=torch.int32, device=DEVICE)
        targets = torch.zeros(3, dtype=torch.int32, device=DEVICE)
        OURS.carry(parts, (words, 2, targets, 1) if count == 1 else None)
        for (source, target), room in zip(parts, rooms, strict=False):
            assert torch.equal(source, target)
            assert bool((room[source.nbytes :] == 0x5A).all())
        assert targets.tolist() == ([0, 9, 0] if count == 1 else [0, 0, 0])


def test_carry_is_checked():
    words = torch.zeros(8, dtype=torch.int32, device=DEVICE)
    for parts, message in (
        ([(words, words[:4])], "32 bytes are carried into 16, contiguous True, True"),
        ([(words.byte()[:3], words.byte()[:3])], "3 bytes are carried into 3"),
        ([(words[::2], words[:4])], "contiguous False, True; allowed: equal multiples of 4"),
        ([], "parts are 0; allowed: 1 to 4"),
        ([(words, words)] * 5, "parts are 5; allowed: 1 to 4"),
    ):
        with pytest.raises(ConfigError, match=message):
            OURS.carry(parts)
    empty = words[:0]
    OURS.carry([(empty, empty)])
