"""Small layers, weights whose arithmetic is exact, and float64 truth, for tests at layer level."""

from collections.abc import Sequence

import torch
from torch import Tensor

from exactmoe import (
    ExpertBank,
    MoEConfig,
    MoELayer,
    PackedWeight,
    Router,
    RouterConfig,
    quantize_experts,
)
from exactmoe.formats import e2m1

BACKENDS = ("reference", "cpu")
FORMATS = ("nvfp4", "mxfp4")
CLASSES = ("a16", "a8")
E2M1 = torch.tensor(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64
)
_BLOCK = {"nvfp4": 16, "mxfp4": 32}


def assert_same_bits(found: Tensor, expected: Tensor, label: str = "") -> None:
    """Equal type, shape and bytes; the message names the first element that differs."""
    assert found.dtype == expected.dtype, f"{found.dtype} is not {expected.dtype}"
    assert found.shape == expected.shape, f"{tuple(found.shape)} is not {tuple(expected.shape)}"
    raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[found.dtype.itemsize]
    wrong = found.contiguous().view(raw) != expected.contiguous().view(raw)
    if bool(wrong.any()):
        place = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{label} {int(wrong.sum())} of {wrong.numel()} differ, first at {place}: "
            f"{found[place].item()!r} is not {expected[place].item()!r}"
        )


def normal(rng: torch.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    """Zero-mean normal bfloat16."""
    return (torch.randn(shape, generator=rng) * scale).bfloat16()


def random_bank(
    rng: torch.Generator, format: str, num_experts: int, hidden: int, inner: int
) -> ExpertBank:
    """Experts quantised from normal weights, scaled so that a unit x keeps its size."""
    sizes = ((inner, hidden), (inner, hidden), (hidden, inner))
    gate, up, down = (
        torch.randn(num_experts, rows, columns, generator=rng) / columns**0.5
        for rows, columns in sizes
    )
    return quantize_experts(gate, up, down, format)


def layer_of(bank: ExpertBank, top_k: int, backend: str = "reference", **settings) -> MoELayer:
    """A layer over a bank. Settings: fields of MoEConfig, or arguments of MoELayer."""
    names = ("swiglu_limit", "numerics")
    config = MoEConfig(
        hidden_size=bank.hidden_size,
        intermediate_size=bank.intermediate_size,
        num_experts=bank.num_experts,
        top_k=top_k,
        **{name: settings.pop(name) for name in names if name in settings},
    )
    return MoELayer(config, bank, backend=backend, **settings)


def random_call(rng: torch.Generator, layer: MoELayer, tokens: int) -> tuple[Tensor, ...]:
    """x, distinct expert ids int32 and positive weights of a call."""
    config = layer.config
    x = normal(rng, tokens, config.hidden_size)
    chances = torch.rand(tokens, config.num_experts, generator=rng)
    ids = chances.argsort(-1)[:, : config.top_k].to(torch.int32)
    weights = torch.rand(tokens, config.top_k, generator=rng) + 0.1
    return x, ids, weights


def routed(layer: MoELayer, x: Tensor, token_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The layer's router alone, on the layer's backend: expert ids and weights [T, K]."""
    return layer.route(x, token_ids)


def exact_weight(format: str, values: Tensor, power: int | Sequence[int] = 0) -> PackedWeight:
    """Values [E, N, K], each an e2m1 number, times 2^power (one for all experts, or one each)."""
    powers = torch.as_tensor([power] * len(values) if isinstance(power, int) else list(power))
    codes = e2m1.pack(e2m1.encode(values.float()))
    shape = (*values.shape[:2], values.shape[2] // _BLOCK[format])
    if format == "nvfp4":
        one = torch.full(shape, 0x38, dtype=torch.uint8)
        return PackedWeight("nvfp4", codes, one, torch.ldexp(torch.ones(len(values)), powers))
    scales = (127 + powers).to(torch.uint8)[:, None, None].expand(shape).contiguous()
    return PackedWeight("mxfp4", codes, scales)


def switch_bank(
    format: str, up: Tensor, down: Tensor, power: int | Sequence[int] = 0
) -> ExpertBank:
    """Experts whose output for x = (1, 0, ...) is exact: 32 x up[e, i] summed with down, x 2^power.

    up [E, I] and down [E, H, I] are e2m1 numbers. Every gate is 32, and silu(32) = 32.
    """
    gates = torch.zeros(*up.shape, down.shape[1])
    gates[..., 0] = 4.0
    ups = torch.zeros_like(gates)
    ups[..., 0] = up
    return ExpertBank(
        exact_weight(format, gates, 3), exact_weight(format, ups), exact_weight(format, down, power)
    )


def first_column(tokens: int, hidden: int) -> Tensor:
    """x = (1, 0, ...) for every token."""
    x = torch.zeros(tokens, hidden)
    x[:, 0] = 1.0
    return x.bfloat16()


def fp8_blocks(values: Tensor) -> PackedWeight:
    """Values [E, N, K] as E4M3 with a scale per 128 x 128 block: its largest magnitude / 448."""
    experts, rows, columns = values.shape
    padded = torch.nn.functional.pad(values.float(), (0, -columns % 128, 0, -rows % 128))
    blocks = padded.unflatten(-1, (-1, 128)).unflatten(1, (-1, 128))  # [E, NB, 128, KB, 128]
    scales = (blocks.abs().amax((2, 4)) / 448.0).clamp(min=2.0**-60)
    scaled = (blocks / scales[:, :, None, :, None]).flatten(3).flatten(1, 2)
    codes = scaled[:, :rows, :columns].to(torch.float8_e4m3fn).view(torch.uint8)
    return PackedWeight("fp8", codes.contiguous(), scales)


def true_values(weight: PackedWeight) -> Tensor:
    """Float64 [E, N, K] from the bytes, by tables of its own (not by exactmoe.formats)."""
    if weight.scales is None:
        return weight.codes.double()
    if weight.format == "fp8":
        rows, columns = torch.arange(weight.rows) // 128, torch.arange(weight.columns) // 128
        scales = weight.scales.double()[:, rows][:, :, columns]
        return weight.codes.view(torch.float8_e4m3fn).double() * scales
    codes = torch.stack((weight.codes & 15, weight.codes >> 4), -1).flatten(-2).long()
    if weight.format == "nvfp4":
        scales = weight.scales.view(torch.float8_e4m3fn).double()
    else:
        scales = torch.ldexp(torch.ones(weight.scales.shape).double(), weight.scales.long() - 127)
    values = E2M1[codes] * scales.repeat_interleave(_BLOCK[weight.format], -1)
    if weight.global_scale is None:
        return values
    scale = weight.global_scale.double()[:, None, None]
    return values * scale if weight.global_scale_op == "multiply" else values / scale


def true_activation(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    """silu of the gate, clamped from above only, times up, clamped on both sides; float64."""
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(gate) * up


def true_experts(
    bank: ExpertBank, x: Tensor, ids: Tensor, weights: Tensor, limit: float | None = None
) -> Tensor:
    """What `experts` approximates, in float64: nothing is rounded in between."""
    gate, up, down = (true_values(w) for w in (bank.gate, bank.up, bank.down))
    y = torch.zeros(len(x), bank.hidden_size, dtype=torch.float64)
    for expert in range(bank.num_experts):
        tokens, places = (ids == expert).nonzero(as_tuple=True)
        rows = x[tokens].double()
        h = true_activation(rows @ gate[expert].T, rows @ up[expert].T, limit)
        y.index_add_(0, tokens, weights[tokens, places].double()[:, None] * (h @ down[expert].T))
    return y


def relative_l2(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected| over all elements, in float64."""
    return float((found.double() - expected).norm() / expected.norm())


def repeating_table(numerics: str, backend: str) -> tuple[MoELayer, Tensor, Tensor, Tensor]:
    """A hash layer whose table repeats ids: (layer, x, token ids, y). Scores are equal, so a weight
    is 0.75; experts 0 and 1 give 32 and 64; every sum is exact.
    """
    up, down = torch.zeros(2, 128), torch.zeros(2, 128, 128)
    up[:, 0], down[:, :, 0] = torch.tensor([1.0, 2.0]), 1.0
    config = RouterConfig("sqrt_softplus", factor=1.5)
    table = torch.tensor([[0, 0], [1, 1], [0, 1], [1, 0]])
    router = Router(torch.zeros(2, 128).bfloat16(), table=table, config=config)
    bank = switch_bank("mxfp4", up, down)
    layer = layer_of(bank, 2, backend, numerics=numerics, router=router)
    tokens = torch.tensor([2, 0, 1, 3, 0])
    expected = torch.tensor([72.0, 48, 96, 72, 48])[:, None].expand(5, 128)
    return layer, first_column(5, 128), tokens, expected.bfloat16()
