"""Class a8 on a card: experts on the fp8 and on the bf16 matrix units, in one layer too.

Values: the dots of down against float64 on the codes and scales that it read (contract section 8).
Bytes: widths, places and tiles; bf16 units against the portable kernels.
"""

import copy

import pytest
import torch

from exactmoe import ExpertBank, Limits, MoEConfig, MoELayer, Numerics, PackedWeight, env
from exactmoe.formats import dequantize, fp8_exact
from exactmoe.formats.rows import Rows
from exactmoe.ops import path
from exactmoe.plan.tiles import TILES
from exactmoe.runtime.routes import RouteTable
from gpu_layers import generator, packed
from layers import assert_same_bits

pytestmark = pytest.mark.gpu
EXPERTS, HIDDEN, INNER, TOP_K = 8, 512, 384, 3
WIDTHS = (1, 2, 5, 16, 17, 64, 130, 400)
MOST = 900
KINDS = ("all exact", "wide spans", "of both kinds", "nvfp4 powers", "nvfp4")


@pytest.fixture
def card() -> str:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the fp8 units of other architectures have no path")
    return "cuda:0"


def numerics(units: str) -> Numerics:
    return Numerics(activation="a8", units=units, slot="f32", output="f32")


def weight(rng: torch.Generator, kind: str, rows: int, columns: int, first: int) -> PackedWeight:
    """Of both kinds: every fourth expert from `first` on has a piece that spans 16 binades."""
    shape = EXPERTS, rows, columns
    if kind == "nvfp4":
        return packed(rng, "nvfp4", *shape)
    if kind == "nvfp4 powers":
        made = packed(rng, "nvfp4", *shape)
        fields = torch.randint(4, 12, made.scales.shape, generator=rng, device=rng.device)
        return PackedWeight("nvfp4", made.codes, (fields << 3).byte(), made.global_scale)
    made = packed(rng, "mxfp4", *shape)
    scales = made.scales.int()
    if kind != "all exact":
        scales += torch.randint(-3, 3, scales.shape, generator=rng, device=rng.device)
    if kind == "of both kinds":
        for expert in range(first, EXPERTS, 4):
            scales[expert, 0, 1] = scales[expert].max()
            scales[expert, 0, 0] = scales[expert].max() - 16
    return PackedWeight("mxfp4", made.codes, scales.byte())


def bank_of(kind: str, card: str) -> ExpertBank:
    rng = generator(card, 7)
    return ExpertBank(
        weight(rng, kind, INNER, HIDDEN, 0),
        weight(rng, kind, INNER, HIDDEN, 1),
        weight(rng, kind, HIDDEN, INNER, 2),
    )


def layer_of(bank: ExpertBank, units: str, backend: str = "auto") -> MoELayer:
    config = MoEConfig(HIDDEN, INNER, EXPERTS, TOP_K, 10.0, numerics(units))
    return MoELayer(config, copy.deepcopy(bank), limits=Limits(max_rows=1024), backend=backend)


def call_of(card: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = generator(card, 3)
    x = torch.randn(MOST, HIDDEN, device=card, generator=rng).bfloat16()
    chances = torch.rand(MOST, EXPERTS, device=card, generator=rng)
    ids = chances.argsort(-1)[:, :TOP_K].int().contiguous()
    return x, ids, torch.rand(MOST, TOP_K, device=card, generator=rng)


@pytest.mark.parametrize("units", ["auto", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_has_one_bit_pattern(card, kind, units):
    layer, (x, ids, weights) = layer_of(bank_of(kind, card), units), call_of(card)
    assert layer.plan().backend == "cuda"
    expected = layer.experts(x, ids, weights)
    assert expected.isfinite().all()
    for tokens in WIDTHS:
        for first in (0, 7):
            part = slice(first, first + tokens)
            assert_same_bits(layer.experts(x[part], ids[part], weights[part]), expected[part])
    for tile in TILES["cuda_a8"]["gate_up"]:
        with env.forced("EXACTMOE_TILE", str(tile.tokens)):
            assert_same_bits(layer.experts(x, ids, weights), expected)
            assert_same_bits(layer.experts(x[:5], ids[:5], weights[:5]), expected[:5])


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_units_give_the_bits_of_the_portable_kernels(card, kind):
    bank, call = bank_of(kind, card), call_of(card)
    one = layer_of(bank, "bf16").experts(*call)
    assert_same_bits(layer_of(bank, "bf16", "triton").experts(*call), one)


def test_a_group_of_the_largest_magnitudes(card):
    """Its scale is 2^120; the weights that meet the large value are zeros."""
    weights = list(bank_of("nvfp4", card).weights())
    for index in (0, 1):
        codes = weights[index].codes.clone()
        codes[:, :, 0] &= 0x70
        weights[index] = PackedWeight(
            "nvfp4", codes, weights[index].scales, weights[index].global_scale
        )
    bank, (x, ids, routing) = ExpertBank(*weights), call_of(card)
    x[:3, 0] = 3.3e38
    call = x[:40], ids[:40], routing[:40]
    found = layer_of(bank, "bf16").experts(*call)
    assert found.isfinite().all()
    assert_same_bits(layer_of(bank, "bf16", "triton").experts(*call), found)


@pytest.mark.parametrize("kind", ["of both kinds", "nvfp4"])
def test_experts_that_are_not_exact_have_the_bits_of_the_bf16_units(card, kind):
    """Decided from its own bytes: gate, up and down of an expert that none of them fits."""
    bank, (x, _, _) = bank_of("nvfp4", card), call_of(card)
    if kind == "of both kinds":
        rng = generator(card, 9)
        parts = [
            weight(rng, kind, *size, 0) for size in ((INNER, HIDDEN),) * 2 + ((HIDDEN, INNER),)
        ]
        bank = ExpertBank(*parts)
    inexact = [e for e in range(EXPERTS) if not any(fp8_exact(w)[e] for w in bank.weights())]
    assert inexact
    ids = torch.tensor(inexact, dtype=torch.int32, device=card)
    ids = ids[torch.arange(MOST, device=card) % len(inexact)][:, None].contiguous()
    ones = torch.ones(MOST, 1, device=card)
    found = layer_of(bank, "auto").experts(x, ids, ones)
    assert_same_bits(found, layer_of(bank, "bf16").experts(x, ids, ones))


@pytest.mark.parametrize("kind", ["all exact", "wide spans", "nvfp4 powers"])
def test_down_on_the_fp8_units_is_near_float64(card, kind):
    """2^-12 for one projection, from the codes and scales that it read."""
    bank, tokens, store = bank_of(kind, card), 64, path("cuda_a8").storage
    down = dequantize(bank.down).double()
    ops = path("cuda_a8")
    _, _, prepared = bank.prepared_for(ops)
    assert prepared.units == "fp8"
    rows = store.rows_of_h(tokens, EXPERTS)
    h = torch.zeros(rows, INNER, device=card, dtype=torch.float8_e4m3fn)
    scales = torch.ones(rows, INNER // 128, device=card)
    ids = (torch.arange(tokens, device=card, dtype=torch.int32) % EXPERTS)[:, None].contiguous()
    routes = RouteTable(
        torch.zeros(EXPERTS + 1, device=card, dtype=torch.int32),
        torch.zeros(tokens, device=card, dtype=torch.int32),
        torch.zeros(1, device=card, dtype=torch.int64),
    )
    ops.route_table(ids, EXPERTS, routes)
    values = torch.randn(tokens, INNER, device=card, generator=generator(card, 5))
    quantized = ops.quantize(
        values,
        Rows(
            torch.empty_like(values, dtype=h.dtype), torch.empty(tokens, INNER // 128, device=card)
        ),
    )
    packed_rows(quantized, routes, h, scales)
    slots = torch.zeros(tokens, HIDDEN, device=card)
    ops.down(Rows(h, scales, None), prepared, routes, numerics("auto"), slots)
    read = quantized.values.double().view(tokens, -1, 128) * quantized.scales[..., None].double()
    read = read.view(tokens, INNER)
    expected = torch.stack([down[int(ids[t, 0])] @ read[t] for t in range(tokens)])
    error = (slots.double() - expected).norm() / expected.norm()
    assert error < 2.0**-12


def packed_rows(rows: Rows, routes: RouteTable, h: torch.Tensor, scales: torch.Tensor) -> None:
    """Rows [S, K] of slots into the order that kernels/cuda/experts.cu reads, byte by byte."""
    offsets, slots = routes.offsets.tolist(), routes.slots.tolist()
    chunks = rows.values.shape[1] // 128
    codes = rows.values.view(torch.uint8).cpu()
    found, kept = h.view(torch.uint8).cpu().view(-1, 8, 8, 16), scales.cpu().view(-1, 8)
    for expert, (begin, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
        eights = (end - begin + 7) // 8
        base = (begin // 8 + expert) * chunks
        for place in range(begin, end):
            row, slot = place - begin, slots[place]
            for chunk in range(chunks):
                piece = base + chunk * eights + row // 8
                for part in range(8):
                    first = chunk * 128 + part * 16
                    found[piece, row % 8, part ^ row % 8] = codes[slot, first : first + 16]
                kept[piece, row % 8] = rows.scales[slot, chunk].cpu()
    h.view(torch.uint8).copy_(found.view(h.shape))
    scales.copy_(kept.view(scales.shape))
