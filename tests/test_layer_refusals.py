"""What MoELayer, DenseMLP and Router refuse, with the value and what is allowed in the message."""

import numpy as np
import pytest
import torch

from exactmoe import (
    DenseMLP,
    ExpertBank,
    Limits,
    MoELayer,
    PackedWeight,
    Placement,
    Router,
    RouterConfig,
)
from exactmoe.errors import ConfigError, Unsupported
from exactmoe.runtime.workspace import arena
from layers import assert_same_bits, fp8_blocks, layer_of, normal, random_bank, random_call

SIGMOID = RouterConfig(score="sigmoid")


@pytest.fixture
def layer(rng) -> MoELayer:
    """5 experts, top 2, H = 64, I = 32, router and shared expert."""
    router = Router(normal(rng, 5, 64), config=SIGMOID)
    shared = DenseMLP(normal(rng, 32, 64), normal(rng, 32, 64), normal(rng, 64, 32))
    return layer_of(random_bank(rng, "nvfp4", 5, 64, 32), 2, "cpu", router=router, shared=shared)


BAD_X = [
    (lambda x: x.float(), Unsupported, r"torch\.float32.*torch\.bfloat16"),
    (lambda x: x.half(), Unsupported, r"torch\.float16"),
    (lambda x: x[:, :32], ConfigError, r"\(6, 32\).*64"),
    (lambda x: x[None], ConfigError, r"\(1, 6, 64\)"),
    (lambda x: x[0], ConfigError, r"\(64,\)"),
    (lambda x: x.to("meta"), ConfigError, "meta.*cpu"),
    (lambda x: x.clone().requires_grad_(), Unsupported, "gradient"),
    (lambda x: x.tolist(), ConfigError, "list.*tensor"),
    (lambda x: x.to_sparse(), ConfigError, r"x has layout torch\.sparse_coo.*torch\.strided"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD_X)
def test_x(change, error, message, layer, rng):
    x, ids, weights = random_call(rng, layer, 6)
    calls = (layer, layer.shared, lambda x: layer.experts(x, ids, weights))
    for call in calls:
        with pytest.raises(error, match=message):
            call(change(x))


@pytest.mark.parametrize("name", ["gate", "up", "down"])
def test_fp8_experts_in_class_a8(name, rng):
    bank = random_bank(rng, "mxfp4", 2, 128, 128)
    parts = {n: getattr(bank, n) for n in ("gate", "up", "down")}
    parts[name] = fp8_blocks(torch.randn(2, 128, 128, generator=rng))
    mixed = ExpertBank(**parts)
    assert layer_of(mixed, 1, "cpu").explain().formats == mixed.formats
    with pytest.raises(Unsupported, match=r"fp8.*class is a8.*class a16 only: no order is defined"):
        layer_of(mixed, 1, "cpu", numerics="a8")


BAD_ROUTES = [
    (lambda i, w: (i.short(), w), ConfigError, r"torch\.int16.*int32, int64"),
    (lambda i, w: (i.float(), w), ConfigError, r"torch\.float32.*int32, int64"),
    (lambda i, w: (i[:5], w[:5]), ConfigError, r"\(5, 2\).*6"),
    (lambda i, w: (i.repeat(1, 2), w.repeat(1, 2)), ConfigError, r"\(6, 4\).*2"),
    (lambda i, w: (i.flatten(), w), ConfigError, r"\(12,\)"),
    (lambda i, w: (i, w[:, :1]), ConfigError, r"\(6, 1\).*\(6, 2\)"),
    (lambda i, w: (i, w.double()), ConfigError, r"torch\.float64.*torch\.float32"),
    (lambda i, w: (i, w.bfloat16()), ConfigError, r"torch\.bfloat16.*torch\.float32"),
    (lambda i, w: (i.to("meta"), w), ConfigError, "expert_ids.*meta.*cpu"),
    (lambda i, w: (i, w.to("meta")), ConfigError, "weights.*meta.*cpu"),
    (lambda i, w: (i, w.clone().requires_grad_()), Unsupported, "weights.*gradient"),
    (lambda i, w: (i.tolist(), w), ConfigError, "expert_ids.*list.*tensor"),
    (lambda i, w: (i, w.tolist()), ConfigError, "weights.*list.*tensor"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD_ROUTES)
def test_routes(change, error, message, layer, rng):
    x, ids, weights = random_call(rng, layer, 6)
    with pytest.raises(error, match=message):
        layer.experts(x, *change(ids, weights))


def test_weights_that_require_a_gradient_pass_under_no_grad(layer, rng):
    x, ids, weights = random_call(rng, layer, 6)
    expected = layer.experts(x, ids, weights)
    with torch.no_grad():
        assert_same_bits(layer.experts(x, ids, weights.clone().requires_grad_()), expected)
    found = layer.experts(x, ids, weights)
    assert not found.requires_grad
    assert_same_bits(found, expected)


def test_parameters_that_require_a_gradient_are_taken_as_they_are(rng):
    def parameter(*shape: int) -> torch.nn.Parameter:
        return torch.nn.Parameter(normal(rng, *shape))

    router = Router(parameter(5, 64), torch.nn.Parameter(torch.zeros(5)), config=SIGMOID)
    parts = [parameter(32, 64), parameter(32, 64), parameter(64, 32)]
    shared = DenseMLP(*parts)
    packed = DenseMLP(*(PackedWeight("bf16", part[None]) for part in parts))
    bank = random_bank(rng, "nvfp4", 5, 64, 32)
    layer = layer_of(bank, 2, "cpu", router=router, shared=shared)
    for backend in ("cpu", "reference"):
        layer.backend = packed.backend = shared.backend = backend
        x = normal(rng, 3, 64)
        assert not layer(x).requires_grad
        assert_same_bits(packed(x), shared(x))
    assert shared.bank.gate_codes.data_ptr() == parts[0].data_ptr()  # nothing was copied


@pytest.mark.parametrize("name", ["forward", "experts", "shared"])
def test_out(name, layer, rng):
    x, ids, weights = random_call(rng, layer, 6)

    def call(out: torch.Tensor | None) -> torch.Tensor:
        if name == "experts":
            return layer.experts(x, ids, weights, out=out)
        return (layer if name == "forward" else layer.shared)(x, out=out)

    out = torch.full((6, 64), float("nan")).bfloat16()
    assert call(out) is out
    assert_same_bits(out, call(None))
    wide = torch.zeros(8, 64).bfloat16()
    inner = call(wide[1:7])
    assert inner.data_ptr() == wide[1:7].data_ptr()
    assert_same_bits(inner, out)
    assert not wide[[0, 7]].any()
    for wrong, message in (
        (torch.zeros(6, 64), "float32.*bfloat16"),
        (torch.zeros(5, 64).bfloat16(), r"\(5, 64\).*\(6, 64\)"),
        (torch.zeros(6, 128).bfloat16()[:, :64], "contiguous False"),
        (torch.zeros(6, 64, device="meta").bfloat16(), "meta.*cpu"),
        (x, "shares memory with x"),
        ([0.0], "out is list"),
    ):
        with pytest.raises(ConfigError, match=message):
            call(wrong)


def test_out_may_not_share_memory_with_ids_or_weights(rng):
    bank = random_bank(rng, "nvfp4", 5, 64, 32)
    layer = layer_of(bank, 2, "cpu", numerics={"output": "f32"})
    x, ids, weights = random_call(rng, layer, 6)
    memory = torch.zeros(6 * 64 + 12)
    shared_weights = memory[-12:].view(6, 2).copy_(weights)
    with pytest.raises(ConfigError, match="out shares memory with weights"):
        layer.experts(x, ids, shared_weights, out=memory[: 6 * 64].view(6, 64))
    shared_ids = memory.view(torch.int32)[-12:].view(6, 2).copy_(ids)
    with pytest.raises(ConfigError, match="out shares memory with expert_ids"):
        layer.experts(x, shared_ids, weights, out=memory[: 6 * 64].view(6, 64))


def test_out_may_not_share_memory_with_token_ids(rng):
    table = torch.randint(5, (30, 2), generator=rng)
    router = Router(normal(rng, 5, 64), table=table, config=SIGMOID)
    bank, limits = random_bank(rng, "nvfp4", 5, 64, 32), Limits(max_rows=1)
    layer = layer_of(bank, 2, "cpu", router=router, limits=limits)
    memory = torch.zeros(6 * 64 * 2, dtype=torch.uint8)
    out, token_ids = memory.view(torch.bfloat16).view(6, 64), memory[128 : 128 + 48]
    with pytest.raises(ConfigError, match="out shares memory with token_ids"):
        layer(normal(rng, 6, 64), token_ids.view(torch.int64), out=out)


def test_out_may_not_overlap_memory_that_another_storage_holds(layer, rng):
    memory = np.zeros((20, 64), np.int16)
    x, ids, weights = random_call(rng, layer, 6)
    shared_x = torch.from_numpy(memory[1:7]).view(torch.bfloat16).copy_(x)
    calls = (layer, layer.shared, lambda x, out: layer.experts(x, ids, weights, out))
    for call in calls:
        for first in (0, 1, 6):
            out = torch.from_numpy(memory[first : first + 6]).view(torch.bfloat16)
            with pytest.raises(ConfigError, match="out shares memory with x"):
                call(shared_x, out=out)
        apart = torch.from_numpy(memory[7:13]).view(torch.bfloat16)
        assert_same_bits(call(shared_x, out=apart), call(x, out=torch.empty_like(x)))


def test_out_may_not_be_memory_of_the_layer(rng):
    parts = [normal(rng, *size) for size in ((5, 64, 64), (5, 64, 64), (5, 64, 64))]
    bank = ExpertBank(*(PackedWeight("bf16", part) for part in parts))
    shared = DenseMLP(*(normal(rng, 64, 64) for _ in range(3)))
    layer = layer_of(
        bank, 2, "cpu", router=Router(normal(rng, 6, 64)[:5], config=SIGMOID), shared=shared
    )
    x, ids, weights = random_call(rng, layer, 5)
    workspace = arena(torch.device("cpu"))._buffer[:640].view(torch.bfloat16).view(5, 64)
    for name, out in (
        (r"the layer's bank\.down_codes", bank.down_codes.view(-1, 64)[:5]),
        (r"the layer's router\.weight", layer.router.weight),
        (r"the layer's shared\.bank\.up_codes", shared.bank.up_codes[0, 3:8]),
        ("the workspace", workspace),
    ):
        for call in (layer, lambda x, out: layer.experts(x, ids, weights, out)):
            with pytest.raises(ConfigError, match=f"out shares memory with {name}"):
                call(x, out=out)
    for name, out in (("bank.gate_codes", shared.bank.gate_codes[0, :5]), ("", workspace)):
        with pytest.raises(ConfigError, match=f"out shares memory with .*{name}"):
            shared(x, out=out)


def test_no_tokens_with_out(layer):
    nothing = torch.zeros(0, 64).bfloat16()
    out = torch.zeros(0, 64).bfloat16()
    assert layer(nothing, out=out) is out
    assert layer.shared(nothing, out=nothing.clone()).shape == (0, 64)


def test_a_layer_without_a_router_says_what_to_call(layer, rng):
    bare = MoELayer(layer.config, layer.bank)
    with pytest.raises(ConfigError, match=r"experts\(x, expert_ids, weights\)"):
        bare(normal(rng, 2, 64))


def test_token_ids_of_a_hash_layer(rng):
    table = torch.randint(5, (30, 2), generator=rng)
    router = Router(normal(rng, 5, 64), table=table, config=SIGMOID)
    layer = layer_of(random_bank(rng, "nvfp4", 5, 64, 32), 2, "cpu", router=router)
    x, tokens = normal(rng, 4, 64), torch.tensor([0, 29, 7, 7])
    expected = layer(x, tokens)
    assert_same_bits(layer(x, tokens.int()), expected)
    assert_same_bits(layer(x, tokens.repeat_interleave(2)[::2]), expected)
    for wrong, message in (
        (None, "token_ids are missing"),
        (tokens.float(), "float32"),
        (tokens[:3], r"\(3,\).*4"),
        (tokens[None], r"\(1, 4\)"),
        (torch.tensor([0, 30, 1, 1]), "0 to 30.*0 to 29"),
        (torch.tensor([0, -1, 1, 1]), "-1 to 1.*0 to 29"),
        (tokens.to("meta"), "token_ids.*meta.*cpu"),
    ):
        with pytest.raises(ConfigError, match=message):
            layer(x, wrong)


def test_parts_that_do_not_fit(layer, rng):
    config, bank = layer.config, layer.bank
    with pytest.raises(ConfigError, match=r"router is \(4, 64\).*\(5, 64\)"):
        MoELayer(config, bank, Router(normal(rng, 4, 64), config=SIGMOID))
    table = torch.zeros(9, 3).long()
    with pytest.raises(ConfigError, match="table gives 3 ids a token; top_k is 2"):
        MoELayer(config, bank, Router(normal(rng, 5, 64), table=table, config=SIGMOID))
    with pytest.raises(ConfigError, match="top_k is 6.*num_experts = 5"):
        layer_of(bank, 6, router=layer.router)
    with pytest.raises(ConfigError, match="shared expert has hidden_size 32.*64"):
        shared = DenseMLP(normal(rng, 32, 32), normal(rng, 32, 32), normal(rng, 32, 32))
        MoELayer(config, bank, layer.router, shared)


def test_dense_weights_that_do_not_fit(rng):
    gate, down = normal(rng, 32, 64), normal(rng, 64, 32)
    for parts, message in (
        ((gate.float(), gate, down), "gate is torch.float32.*bfloat16"),
        ((gate, gate[None], down), r"up is torch.bfloat16 \(1, 32, 64\)"),
        ((gate, gate, gate), r"down is \(1, 32, 64\)"),
        ((gate, gate[:16], down), r"up is \(1, 16, 64\)"),
        ((gate, gate, [1.0]), "down is list"),
        ((PackedWeight("bf16", gate.repeat(2, 1, 1)), gate, down), "gate holds 2 experts"),
    ):
        with pytest.raises(ConfigError, match=message):
            DenseMLP(*parts)
    with pytest.raises(ConfigError, match="swiglu_limit is -1"):
        DenseMLP(gate, gate, down, -1.0)
    with pytest.raises(ConfigError, match="numerics.output is 'f16'"):
        DenseMLP(gate, gate, down, output="f16")


def test_placement(layer):
    config, bank = layer.config, layer.bank
    assert MoELayer(config, bank, cards=["cpu"]).placement == Placement(cards=("cpu",))
    with pytest.raises(ConfigError, match="both given"):
        MoELayer(config, bank, placement=Placement(), cards=["cpu"])
    with pytest.raises(Unsupported, match="card is 'cuda:0'; torch .* sees no GPU"):
        MoELayer(config, bank, cards=["cuda:0"])
    with pytest.raises(ConfigError, match="card is 'cpu:1'; the bank's weights are on cpu"):
        MoELayer(config, bank, cards=["cpu:1"])
    with pytest.raises(ConfigError, match="backend is 'fast'.*auto, .*cpu, reference"):
        MoELayer(config, bank, backend="fast")


@pytest.mark.parametrize("width", [0, -1, 1.5, "8", True])
def test_explain_of_no_width(layer, width):
    for asked in (layer, layer.shared):
        with pytest.raises(ConfigError, match="width is .*; allowed: an integer from 1"):
            asked.explain(width)


def test_limits_that_are_none(layer):
    with pytest.raises(ConfigError, match=r"limits is 3; allowed: Limits\(...\), or None"):
        MoELayer(layer.config, layer.bank, limits=3)
