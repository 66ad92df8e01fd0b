"""Field faults of memory, width and order: A19, A20, A22, A23, A24."""

import itertools

import pytest
import torch

from exactmoe import DenseMLP, Limits, MoELayer, Numerics, Router, RouterConfig
from exactmoe.runtime.workspace import arena
from layers import (
    BACKENDS,
    CLASSES,
    assert_same_bits,
    first_column,
    layer_of,
    normal,
    random_bank,
    random_call,
    routed,
    switch_bank,
)

CPU = torch.device("cpu")
WIDTHS = {
    "reference": (1, 2, 9),
    "cpu": (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 257, 1000),
}
FORMAT_OF = {"a16": "nvfp4", "a8": "mxfp4"}
# Float32 slots and outputs show a last bit that rounding to bf16 would hide.
NUMERICS = {
    "a16": Numerics(),
    "a16 wide": Numerics(slot="f32", output="f32"),
    "a8": Numerics.preset("a8"),
    "a8 wide": Numerics(activation="a8", units="auto", slot="f32", output="f32"),
}
WIDE = ("a16 wide", "a8 wide")
BIG = 2.0**24


def whole(rng, backend: str, numerics: str, hashed: bool = False, max_rows: int = 512) -> MoELayer:
    """16 experts, top 3, H = I = 128, router (score or hash) and shared expert."""
    table = torch.stack([torch.randperm(16, generator=rng)[:3] for _ in range(64)])
    bias = torch.randn(16, generator=rng)
    router = Router(
        normal(rng, 16, 128),
        None if hashed else bias,
        table if hashed else None,
        config=RouterConfig(score="sqrt_softplus" if hashed else "sigmoid", factor=2.5),
    )
    sizes = ((64, 128), (64, 128), (128, 64))
    parts = [normal(rng, *size, scale=0.1) for size in sizes]
    output = NUMERICS[numerics].output
    shared = DenseMLP(*parts, 10.0, backend=backend, output=output)
    return layer_of(
        random_bank(rng, FORMAT_OF[numerics.split()[0]], 16, 128, 128),
        3,
        backend,
        numerics=NUMERICS[numerics],
        swiglu_limit=10.0,
        router=router,
        shared=shared,
        limits=Limits(max_rows=max_rows),
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("numerics", CLASSES)
@pytest.mark.usefixtures("poison")
def test_a19_old_memory_never_shows(numerics, backend, rng):
    """288 experts, most of them empty; the workspace full of zeros, NaN, and 3.4e38."""
    bank = random_bank(rng, FORMAT_OF[numerics], 288, 128, 128)
    layer = layer_of(bank, 3, backend, numerics=numerics)
    for width in (5, *WIDTHS[backend][:-1]):
        x, ids, weights = random_call(rng, layer, width)
        ids[-1] = -1
        ids[0, 1:] = -1
        results = []
        for byte in (0x00, 0xFF, 0x7F):
            arena(CPU).fill(byte)
            results.append(layer.experts(x, ids, weights))
        assert not results[0].isnan().any()
        assert_same_bits(results[0][-1], torch.zeros(128).bfloat16())
        assert_same_bits(results[1], results[0])
        assert_same_bits(results[2], results[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("numerics", CLASSES)
@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.usefixtures("poison")
def test_a19_old_memory_never_shows_in_a_whole_block(hashed, numerics, backend, rng):
    layer = whole(rng, backend, numerics, hashed)
    x, tokens = normal(rng, 9, 128), torch.randint(64, (9,), generator=rng)
    results = []
    for byte in (0x00, 0xFF, 0x7F):
        arena(CPU).fill(byte)
        results.append((layer(x, tokens), layer.shared(x), *routed(layer, x, tokens)))
    for found in results[1:]:
        for one, other in zip(found, results[0], strict=True):
            assert_same_bits(one, other)
    assert not results[0][0].isnan().any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("numerics", CLASSES)
@pytest.mark.parametrize("hashed", [False, True])
def test_a20_zero_tokens_in_every_path(hashed, numerics, backend, rng):
    layer = whole(rng, backend, numerics, hashed)
    x, tokens = normal(rng, 4, 128), torch.randint(64, (4,), generator=rng)
    before = layer(x, tokens)
    _, ids, weights = random_call(rng, layer, 4)
    nothing = x[:0]
    for empty in (nothing, torch.empty(0, 128, dtype=torch.bfloat16)):
        results = (
            layer(empty, tokens[:0]),
            layer.experts(empty, ids[:0], weights[:0]),
            layer.experts(empty, ids[:0].long(), weights[:0]),
            layer.shared(empty),
        )
        for y in results:
            assert (y.shape, y.dtype, y.device) == ((0, 128), torch.bfloat16, CPU)
    found = routed(layer, nothing, tokens[:0])
    assert [tuple(part.shape) for part in found] == [(0, 3), (0, 3)]
    layer.check()
    assert_same_bits(layer(x, tokens), before)


def neighbours(rng, layer: MoELayer, width: int, needle: tuple) -> dict[str, tuple]:
    """Calls of `width` tokens of every kind that the needle may stand among."""
    x, ids, weights = random_call(rng, layer, width)
    experts = layer.config.num_experts
    others = torch.tensor([e for e in range(experts) if e not in needle[1][0]], dtype=torch.int32)
    strange = x.clone()
    strange[::3] = float("nan")
    strange[1::3] = float("inf")
    return {
        "random": (x, ids, weights),
        "all to its experts": (x, needle[1].expand(width, -1), weights),
        "none to its experts": (x, others[ids.long() % len(others)], weights),
        "scaled by 1e4": (x * 1e4, ids, weights * 1e4),
        "NaN and Inf": (strange, ids, weights),
        "absent": (x, torch.full_like(ids, -1), weights),
    }


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("numerics", WIDE)
def test_a22_a_token_does_not_depend_on_its_neighbours(numerics, backend, rng):
    layer = whole(rng, backend, numerics)
    needle = random_call(rng, layer, 1)
    alone = layer.experts(*needle), layer(needle[0]), layer.shared(needle[0])
    assert not any(y.isnan().any() for y in alone)
    for width in WIDTHS[backend][1:]:
        for name, call in neighbours(rng, layer, width, needle).items():
            for place in sorted({0, width // 2, width - 1}):
                x, ids, weights = (part.clone() for part in call)
                for part, own in zip((x, ids, weights), needle, strict=True):
                    part[place] = own[0]
                label = f"width {width}, place {place}, neighbours {name}"
                found = layer.experts(x, ids, weights)[place]
                assert_same_bits(found, alone[0][0], label)
                if name in ("random", "scaled by 1e4", "NaN and Inf"):
                    assert_same_bits(layer(x)[place], alone[1][0], label)
                    assert_same_bits(layer.shared(x)[place], alone[2][0], label)


@pytest.mark.parametrize("numerics", ["a16", *WIDE])
@pytest.mark.parametrize("hashed", [False, True])
def test_a23_decode_verify_and_prefill_agree(hashed, numerics, rng):
    """300 tokens one by one, in chunks, and at once; router and shared expert included."""
    layer = whole(rng, "cpu", numerics, hashed)
    x, tokens = normal(rng, 300, 128), torch.randint(64, (300,), generator=rng)
    expected = layer(x, tokens), *routed(layer, x, tokens)
    for chunk in (1, 2, 3, 5, 8, 64):
        starts = range(0, 300, chunk)
        parts = [(x[s : s + chunk], tokens[s : s + chunk]) for s in starts]
        assert_same_bits(torch.cat([layer(*part) for part in parts]), expected[0])
        ids, weights = (
            torch.cat(p) for p in zip(*(routed(layer, *part) for part in parts), strict=True)
        )
        assert_same_bits(ids, expected[1])
        assert_same_bits(weights, expected[2])
    mixed = torch.cat(
        [layer(x[a:b], tokens[a:b]) for a, b in itertools.pairwise((0, 1, 4, 64, 129, 300))]
    )
    assert_same_bits(mixed, expected[0])


@pytest.mark.parametrize("numerics", WIDE)
def test_a23_chunks_agree_on_the_reference(numerics, rng):
    layer = whole(rng, "reference", numerics)
    x = normal(rng, 13, 128)
    expected = layer(x)
    for chunk in (1, 2, 5):
        found = torch.cat([layer(x[s : s + chunk]) for s in range(0, 13, chunk)])
        assert_same_bits(found, expected)


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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("numerics", CLASSES)
@pytest.mark.parametrize("case", A24)
def test_a24_the_order_of_the_combine_is_the_group_tree(case, numerics, backend):
    ids, num_experts, expected = case
    size = 128
    up, down = torch.zeros(num_experts, size), torch.zeros(num_experts, size, size)
    up[:, 0] = 1.0
    powers = [0] * num_experts
    for expert, value in zip(ids, (BIG, 1.0, -BIG, 1.0), strict=True):
        down[expert, :, 0] = 1.0 if value > 0 else -1.0
        powers[expert] = 19 if abs(value) == BIG else -5  # times h = 32
    layer = layer_of(switch_bank("mxfp4", up, down, powers), 4, backend, numerics=numerics)
    wanted = torch.full((1, size), expected).bfloat16()
    for order in itertools.permutations(ids):
        y = layer.experts(first_column(1, size), torch.tensor([order]), torch.ones(1, 4))
        assert_same_bits(y, wanted)
    for _ in range(200 if backend == "cpu" else 2):
        y = layer.experts(first_column(1, size), torch.tensor([ids]), torch.ones(1, 4))
        assert_same_bits(y, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a24_the_shared_expert_comes_last(backend):
    """Huge routed outputs of either sign cancel; then the 1 of the shared expert is added."""
    size = 128
    up, down = torch.zeros(8, size), torch.zeros(8, size, size)
    up[:, 0] = 1.0
    down[0, :, 0], down[7, :, 0] = 1.0, -1.0
    weight = torch.zeros(8, size)
    weight[[0, 7], 0] = 1.0
    config = RouterConfig(score="sigmoid", normalize=False, factor=1.0)
    one, third = torch.zeros(16, size), torch.zeros(size, 16)
    one[0, 0], third[:, 0] = 32.0, 2.0**-10  # 32 x 32 x 2^-10 = 1
    shared = DenseMLP(one.bfloat16(), one.bfloat16(), third.bfloat16(), backend=backend)
    layer = layer_of(
        switch_bank("mxfp4", up, down, 24),
        2,
        backend,
        router=Router(weight.bfloat16(), config=config),
        shared=shared,
    )
    assert_same_bits(layer(first_column(1, size)), torch.ones(1, size).bfloat16())
