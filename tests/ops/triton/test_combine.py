"""combine and finish on the card's path: the reference's bytes."""

import pytest
import torch
from torch import Tensor

from exactmoe import ops, reference
from exactmoe.config import Numerics
from exactmoe.ops.triton.combine import combine
from exactmoe.ops.triton.finish import finish
from layers import assert_same_bits
from triton_device import DEVICE

NAN, INF = float("nan"), float("inf")
CLASSES = {
    "a16": Numerics(),
    "a16 f32": Numerics(slot="f32", output="f32"),
    "a8": Numerics.preset("a8"),
}


def run(slots, ids, weights, experts, numerics, shared) -> Tensor:
    kind = torch.bfloat16 if numerics.output == "bf16" else torch.float32
    y = torch.full((len(ids), slots.shape[1]), 7.0, dtype=kind, device=DEVICE)
    routed = (ids.to(DEVICE), weights.to(DEVICE))
    given = None if shared is None else shared.to(DEVICE)
    combine(slots.to(DEVICE), routed, experts, numerics, given, y)
    return y.cpu()


def compare(slots, ids, weights, experts, numerics, shared) -> Tensor:
    found = run(slots, ids, weights, experts, numerics, shared)
    expected = torch.empty_like(found)
    ops.path("reference").combine(
        slots.float(), (ids, weights), experts, numerics, shared, expected
    )
    assert_same_bits(found, expected)
    return found


def case(rng, numerics, tokens, top_k, hidden, experts):
    """Slots, ids with repeats, absent ones and ids >= E, weights of both signs; a shared row."""
    slots = torch.randn(tokens * top_k, hidden, generator=rng)
    slots = slots.bfloat16() if numerics.slot == "bf16" else slots
    ids = torch.randint(-1, experts + 1, (tokens, top_k), generator=rng).int()
    weights = torch.randn(tokens, top_k, generator=rng)
    shared = torch.randn(tokens, hidden, generator=rng)
    return slots, ids, weights, shared


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize(
    ("tokens", "top_k", "hidden", "experts"),
    [(0, 2, 64, 8), (1, 8, 304, 288), (3, 1, 16, 3), (1, 13, 257, 5)],
)
def test_same_bytes_as_the_reference(name, tokens, top_k, hidden, experts, rng):
    slots, ids, weights, shared = case(rng, CLASSES[name], tokens, top_k, hidden, experts)
    compare(slots, ids, weights, experts, CLASSES[name], shared)
    compare(slots, ids, weights, experts, CLASSES[name], None)


@pytest.mark.parametrize("experts", [3, 8, 1000])
def test_every_pair_of_groups(experts, rng):
    """Two experts a token, each pair of groups once: every way through the tree."""
    firsts = {-(-group * experts // 8) for group in range(8)}
    firsts = sorted(e for e in firsts if e < experts)
    ids = torch.tensor([[b, a] for a in firsts for b in firsts if a <= b], dtype=torch.int32)
    slots = torch.randn(ids.numel(), 16, generator=rng).bfloat16()
    compare(slots, ids, torch.randn(ids.shape, generator=rng), experts, Numerics(), None)


def test_all_groups_at_once(rng):
    ids = torch.stack([torch.randperm(16, generator=rng) for _ in range(4)]).int()
    slots = torch.randn(64, 32, generator=rng)
    weights = torch.randn(4, 16, generator=rng)
    compare(slots, ids, weights, 16, CLASSES["a16 f32"], torch.randn(4, 32, generator=rng))


@pytest.mark.parametrize("name", CLASSES)
def test_the_order_of_a_row_does_not_matter(name, rng):
    slots, ids, weights, shared = case(rng, CLASSES[name], 1, 8, 64, 20)
    ids[0, :4] = 7  # equal ids: ordered by the weight's bits as unsigned
    weights[0, :4] = torch.tensor([-1.0, 0.5, -0.0, 3.0])
    before = compare(slots, ids, weights, 20, CLASSES[name], shared)
    for _ in range(3):
        order = torch.randperm(8, generator=rng)
        moved = (slots[order], ids[:, order], weights[:, order])
        assert_same_bits(run(*moved, 20, CLASSES[name], shared), before)


@pytest.mark.parametrize("numerics", [CLASSES["a16"], CLASSES["a16 f32"]])
def test_special_values_and_one_nan(numerics, rng):
    """Inf in one group does not touch another; every NaN of y is the one quiet NaN."""
    special = [0.0, -0.0, NAN, -NAN, INF, -INF, 1e-40, -1e-45, 3e38, 1.0]
    slots = torch.tensor([[a, b] for a in special for b in special]).T.repeat_interleave(3, 1)
    slots = torch.cat([slots, slots.flip(1)]).contiguous()
    slots = slots.bfloat16() if numerics.slot == "bf16" else slots
    for weights in ([1.0, 1.0], [0.0, 1.0], [-0.0, 2.0], [INF, 1.0], [NAN, 0.5], [1e-30, 1e-45]):
        weight = torch.tensor([weights, weights])
        ids = torch.tensor([[0, 9], [3, 3]], dtype=torch.int32)
        found = compare(slots, ids, weight, 16, numerics, None)
        raw = found.view(torch.int16 if found.dtype == torch.bfloat16 else torch.int32)
        assert set(raw[found.isnan()].tolist()) <= {0x7FC0, 0x7FC00000}


def test_absent_slots_are_not_read(rng):
    slots = torch.full((4, 32), NAN).bfloat16()
    slots[1] = 1.5
    ids = torch.tensor([[-1, 4, 9, 2**31 - 1]], dtype=torch.int32)
    weights = torch.tensor([[NAN, 2.0, INF, NAN]])
    assert compare(slots, ids, weights, 9, Numerics(), None).tolist() == [[3.0] * 32]
    none = torch.tensor([[-1, -1, -2, 9]], dtype=torch.int32)
    assert compare(slots, none, weights, 9, Numerics(), None).tolist() == [[0.0] * 32]


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(0, 16), (1, 16), (3, 1000)])
def test_finish(kind, shape, rng):
    dense = torch.randn(shape, generator=rng)
    special = torch.tensor(
        [0.0, -0.0, NAN, -NAN, INF, -INF, 1e-40, 3.4e38, 1 + 2**-8, 1 + 3 * 2**-8]
    )
    dense.view(-1)[: len(special)] = special[: dense.numel()]
    y = torch.full(shape, 7.0, dtype=kind, device=DEVICE)
    finish(dense.to(DEVICE), y)
    output = "bf16" if kind == torch.bfloat16 else "f32"
    assert_same_bits(y.cpu(), reference.finish(torch.zeros_like(dense), dense, output))
