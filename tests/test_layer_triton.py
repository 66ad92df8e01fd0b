"""Whole layers on backend "triton" without a GPU: Triton interprets its kernels on the CPU.

numpy's dots add in another order than the CPU backend, so random values are compared by error, and
values whose sums are exact by bytes. (On a card tests/gpu compare bytes.)
"""

import importlib
import logging

import pytest
import torch

from exactmoe import (
    DenseLinear,
    DenseMLP,
    Limits,
    MoELayer,
    Numerics,
    PackedWeight,
    Router,
    RouterConfig,
    ops,
)
from exactmoe.block import Space
from exactmoe.errors import ConfigError, Unsupported
from exactmoe.formats.scales import encode_e4m3
from exactmoe.ops.cuda import dense_mlp as cuda_dense
from exactmoe.plan import Plan
from exactmoe.runtime import notes
from exactmoe.runtime.workspace import arena
from layers import (
    CLASSES,
    FORMATS,
    assert_same_bits,
    first_column,
    layer_of,
    normal,
    random_bank,
    random_call,
    relative_l2,
    repeating_table,
    switch_bank,
)
from triton_device import INTERPRETED, use_triton

use_triton()
pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here: tests/gpu runs them"),
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
]
CPU = torch.device("cpu")
SLOT_ERROR = 2.0**-7  # an h or a slot may round to the other neighbour


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def make(rng, format="nvfp4", backend="triton", numerics="a16", **settings) -> MoELayer:
    router = Router(
        normal(rng, 4, 128), bias=torch.zeros(4), config=RouterConfig("sigmoid", factor=2.5)
    )
    sizes = ((64, 128), (64, 128), (128, 64))
    shared = DenseMLP(*(normal(rng, *size, scale=0.1) for size in sizes), backend=backend)
    bank = random_bank(rng, format, 4, 128, 128)
    settings = {"swiglu_limit": 1.0, "router": router, "shared": shared, **settings}
    return layer_of(bank, 2, backend, numerics=numerics, **settings)


def on(layer: MoELayer, backend: str) -> MoELayer:
    """The layer over the same weights on another backend."""
    shared = layer.shared and DenseMLP(
        layer.shared.bank.gate, layer.shared.bank.up, layer.shared.bank.down, backend=backend
    )
    return MoELayer(
        layer.config, layer.bank, layer.router, shared, limits=layer.limits, backend=backend
    )


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("numerics", CLASSES)
def test_a_block_is_near_the_cpu_backend(numerics, format, rng):
    layer = make(rng, format, numerics=numerics)
    x = normal(rng, 5, 128)
    ids, weights = layer.route(x)
    expected_ids, expected_weights = on(layer, "cpu").route(x)
    assert_same_bits(ids, expected_ids)
    assert relative_l2(weights, expected_weights.double()) < 2.0**-18
    kept = x.clone()
    y = layer(x)
    assert y.dtype == torch.bfloat16
    assert relative_l2(y, on(layer, "cpu")(x).double()) < SLOT_ERROR
    assert_same_bits(x, kept)
    assert layer.plan().backend == "triton" and "interpreted, for tests" in layer.plan().reason


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("numerics", [*CLASSES, Numerics(slot="f32", output="f32")])
def test_exact_sums_are_equal_in_every_byte(numerics, format, rng):
    values = torch.tensor([0.5, 1.0, 1.5, 2.0, 3.0, -1.0])
    up = values[torch.randint(6, (3, 128), generator=rng)]
    down = values[torch.randint(6, (3, 128, 128), generator=rng)]
    bank = switch_bank(format, up, down, [0, 1, 2])
    layers = [layer_of(bank, 2, b, numerics=numerics) for b in ("triton", "cpu")]
    x, (_, ids, weights) = first_column(9, 128), random_call(rng, layers[0], 9)
    weights.copy_(weights.bfloat16().round(decimals=1).clamp(min=0.5).bfloat16())
    found, expected = (layer.experts(x, ids, weights) for layer in layers)
    assert_same_bits(found, expected)
    assert_same_bits(layers[0].experts(x[3:4], ids[3:4], weights[3:4]), expected[3:4])


def test_given_tensors_are_read_where_they_are(rng):
    layer = make(rng)
    x, ids, weights = random_call(rng, layer, 4)
    arena(CPU).fill(0xFF)
    expected = layer.experts(x, ids, weights)
    views = arena(CPU).views(layer.regions(layer.limits.max_rows, ops.DEVICE))
    for name in ("x", "expert_ids", "weights"):
        assert (views[name].view(torch.uint8) == 0xFF).all(), name
    wide = torch.zeros(4, 256, dtype=torch.bfloat16)
    wide[:, ::2] = x
    strided = (wide[:, ::2], ids.T.contiguous().T, weights.T.contiguous().T)
    assert not any(t.is_contiguous() for t in strided)
    shifted = torch.zeros(4 * 128 + 1, dtype=torch.bfloat16)[1:].view(4, 128).copy_(x)
    assert shifted.data_ptr() % 16
    for given, copied in (
        (strided, ("x", "expert_ids", "weights")),
        ((x, ids.long(), weights), ("expert_ids",)),
        ((shifted, ids, weights), ("x",)),
    ):
        arena(CPU).fill(0xFF)
        assert_same_bits(layer.experts(*given), expected)
        for name in ("x", "expert_ids", "weights"):
            untouched = bool((views[name].view(torch.uint8) == 0xFF).all())
            assert untouched == (name not in copied), name


def test_ids_out_of_range_and_no_tokens(rng):
    layer = make(rng)
    x, ids, weights = random_call(rng, layer, 3)
    ids[1], ids[2, 0] = -1, 2**31 - 1
    y = layer.experts(x, ids, weights)
    assert_same_bits(y[1], torch.zeros(128, dtype=torch.bfloat16))
    with pytest.raises(ConfigError, match="expert id was >= num_experts = 4"):
        layer.check()
    assert_same_bits(layer.experts(x, ids.long() + (ids > 5) * 2**33, weights), y)
    with pytest.raises(ConfigError, match="expert id was"):
        layer.check()
    empty = [t[:0] for t in (x, ids, weights)]
    assert layer.experts(*empty).shape == layer(x[:0]).shape == (0, 128)
    layer.check()


@pytest.mark.parametrize(
    ("switch", "text"),
    [
        ("EXACTMOE_UNION", "off"),
        ("EXACTMOE_HOST_LOOP", "on"),
        ("EXACTMOE_GATE_UP", "two"),
        ("EXACTMOE_TILE", "32"),
    ],
)
def test_a_lever_changes_no_bit_and_is_named(switch, text, rng, monkeypatch, caplog):
    layer = make(rng)
    x = normal(rng, 3, 128)
    expected = layer(x)
    monkeypatch.setattr(notes, "_said", set())
    monkeypatch.setenv(switch, text)
    with caplog.at_level(logging.INFO, "exactmoe"):
        assert_same_bits(layer(x), expected)
        assert_same_bits(layer(x), expected)
    if switch == "EXACTMOE_TILE":
        assert "EXACTMOE_TILE=32" in str(layer.explain(3))
        assert any("gate_up.py, 32 tokens" in message for message in caplog.messages)
    warned = [r for r in caplog.records if r.message.startswith(f"{switch} is not at its default")]
    assert [record.levelname for record in warned] == ["WARNING"]
    assert f"switch {switch}=" in str(layer.explain(3))


def test_pieces_and_the_log_line(rng, monkeypatch, caplog):
    monkeypatch.setattr(notes, "_said", set())
    layer = make(rng, limits=Limits(max_rows=4))
    x = normal(rng, 9, 128)
    with caplog.at_level(logging.INFO, "exactmoe"):
        pieces = layer(x)
    lines = [m for m in caplog.messages if m.startswith("backend triton on cpu runs nvfp4")]
    assert len(lines) == 1  # 8 and 2 slots take the same tiles
    assert all("down: kernels/triton/down.py, 16 tokens x 64 rows" in line for line in lines)
    assert all(" | not cuda: " in line and "numerics: activation a16" in line for line in lines)
    layer.reserve(9)
    assert_same_bits(layer(x), pieces)


def test_the_log_line_of_a_shared_expert(rng, monkeypatch, caplog):
    monkeypatch.setattr(notes, "_said", set())
    layer, x = make(rng), normal(rng, 3, 128)
    with caplog.at_level(logging.INFO, "exactmoe"):
        layer(x)
        layer(x)
    (line,) = [m for m in caplog.messages if "dense gate_up: kernels/triton/dense_mlp.py" in m]
    assert line.startswith("backend triton on cpu runs bf16, bf16, bf16: dense gate_up: ")
    assert "numerics: activation a16" in line


def test_the_log_says_why_a_shared_expert_has_other_kernels_than_its_path(rng, monkeypatch, caplog):
    """By the plan of its layer; again where its weights have become others."""
    monkeypatch.setattr(notes, "_said", set())
    explain = importlib.import_module("exactmoe.plan.explain")
    monkeypatch.setattr(explain, "architecture_name", lambda device: "sm_90")
    dense = DenseMLP(*(normal(rng, *s) for s in ((64, 128), (64, 128), (128, 64))))
    space = Space(ops.path("triton"), {}, arena(CPU))

    def say() -> None:
        dense.say_first(space, 3, lambda: Plan("cuda", "cuda:0", "the fast path"))

    with caplog.at_level(logging.INFO, "exactmoe"):
        say()
        say()
        (taken,) = (m for m in caplog.messages if m.startswith("backend"))
        dense.bank.gate_codes = torch.zeros(64 * 128 + 4, dtype=torch.bfloat16)[4:].view(1, 64, 128)
        say()
    assert "dense gate_up: kernels/cuda/dense.cu, 8 tokens" in taken and " | not " not in taken
    refused = caplog.messages[-1]
    assert caplog.messages[-2] == taken
    assert "dense gate_up: kernels/triton/dense_mlp.py, 16 tokens" in refused
    said = "the rows of dense gate do not begin at multiples of 16 bytes"
    assert refused.endswith(f" | not kernels/cuda/dense.cu: {said}")


@pytest.mark.parametrize("numerics", CLASSES)
def test_a_table_may_repeat_an_id(numerics):
    layer, x, tokens, expected = repeating_table(numerics, "triton")
    assert_same_bits(layer(x, tokens), expected)
    layer.check()


def test_a_dense_mlp(rng):
    sizes = ((96, 128), (96, 128), (128, 96))
    weights = [normal(rng, *size, scale=0.1) for size in sizes]
    x = normal(rng, 3, 128)
    found, expected = (DenseMLP(*weights, backend=b, output="f32")(x) for b in ("triton", "cpu"))
    assert relative_l2(found, expected.double()) < 2.0**-9


@pytest.mark.parametrize("output", ["bf16", "f32"])
def test_a_linear_layer(output, rng):
    """Pieces, groups, rows that do not lie side by side; by bytes, as these sums are exact."""
    codes = encode_e4m3(torch.randint(-8, 9, (2, 48, 160), generator=rng).float())
    weight = PackedWeight("fp8", codes, torch.rand(2, 1, 2, generator=rng) + 0.5)
    x = torch.randint(-2, 3, (7, 2 * 2 * 160), generator=rng).bfloat16()[:, ::2]
    limits = Limits(max_rows=3)
    found, expected = (
        DenseLinear(weight, limits, backend=b, output=output)(x) for b in ("triton", "cpu")
    )
    assert_same_bits(found, expected)


def test_a_tile_is_checked_against_the_path_of_the_layer(rng, monkeypatch):
    """8 tokens are offered by "cuda" only; dense parts that its own kernel does not take have the
    next wider of the portable tiles.
    """
    monkeypatch.setattr(cuda_dense, "takes", lambda weights: False)
    dense = make(rng).shared
    x = normal(rng, 3, 128)
    arena(CPU).fill(0xFF)
    arrays = arena(CPU).views(dense.regions(3, ops.DEVICE))
    cuda, triton = (Space(ops.path(name), arrays, arena(CPU)) for name in ("cuda", "triton"))
    expected = dense.run(triton, x).clone()
    monkeypatch.setenv("EXACTMOE_TILE", "8")
    arena(CPU).fill(0xFF)
    assert_same_bits(dense.run(cuda, x), expected)
    with pytest.raises(ConfigError, match="EXACTMOE_TILE is 8; allowed on backend 'triton': 16"):
        dense.run(triton, x)
    with pytest.raises(ConfigError, match="EXACTMOE_TILE is 8; allowed on backend 'triton': 16"):
        make(rng)(x)
    monkeypatch.setenv("EXACTMOE_TILE", "24")
    with pytest.raises(ConfigError, match="EXACTMOE_TILE is 24; allowed on backend 'cuda': 8, 16"):
        dense.run(cuda, x)


def test_a_backend_may_change_from_call_to_call(rng, monkeypatch):
    layer = make(rng, backend="auto")
    x = normal(rng, 3, 128)
    results = {}
    for name in ("cpu", "triton", "reference", "triton", "cpu"):
        monkeypatch.setenv("EXACTMOE_BACKEND", name)
        assert layer.plan().backend == name
        y = layer(x)
        assert_same_bits(y, results.setdefault(name, y))
    assert_same_bits(results["cpu"], results["reference"])


def test_without_the_interpreter_it_is_refused(rng, monkeypatch):
    layer = make(rng)
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(Unsupported, match="'triton' cannot run on cpu: it needs a GPU"):
        layer(normal(rng, 1, 128))
