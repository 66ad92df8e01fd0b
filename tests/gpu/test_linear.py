"""FP8 linear layers on a card: one bit pattern at every width, captured and eager, near float64;
and gate and up in one launch and in two.
"""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from exactmoe import DenseLinear, ExpertBank, Numerics, env
from gpu_layers import generator, packed
from layers import assert_same_bits, layer_of, relative_l2, true_values
from native_checkpoints import fp8_parts
from saved_bytes import assert_same_tensors, tensors_in

# (G, N, K) of DeepSeek-V4-Flash: wq_a, wkv, wq_b, the grouped wo_a, wo_b; and short blocks.
SHAPES = [
    (1, 1536, 4096),
    (1, 512, 4096),
    (1, 32768, 1536),
    (8, 1024, 4096),
    (1, 4096, 8192),
    (2, 48, 272),
]
SMALL = (2, 48, 272)
WIDTHS = (1, 2, 3, 8, 9, 16, 17, 33, 64, 65, 129, 300, 1024)


@pytest.fixture(params=SHAPES, ids=str)
def shape(request, device) -> tuple[int, int, int]:
    if device == "cpu" and request.param != SMALL:
        pytest.skip("tests/test_linear.py has small sizes")
    return request.param


def case(shape, device, tokens):
    rng = generator(device, sum(shape))
    layer = DenseLinear(packed(rng, "fp8", *shape), output="f32")
    x = torch.randn(tokens, shape[0] * shape[2], generator=rng, device=device).bfloat16()
    return layer, x


def test_one_bit_pattern_at_every_width(shape, device):
    layer, x = case(shape, device, 1024 if device == "cuda" else 65)
    expected = layer(x)
    for width in WIDTHS:
        for first in (0, 5):
            rows = slice(first, first + width)
            assert_same_bits(layer(x[rows]), expected[rows], f"width {width} from {first}")
    x[3] = float("nan")
    dirty = layer(x)
    assert_same_bits(dirty[4:], expected[4:])
    assert bool((dirty[3].view(torch.int32) == 0x7FC00000).all())


def test_error_against_float64(shape, device):
    """Contract section 8: 2^-17 up to k = 4096, beyond in proportion."""
    layer, x = case(shape, device, 64)
    groups, rows, columns = shape
    weight = layer.weight
    parts = (weight.codes.cpu(), weight.scales.cpu())
    truth = true_values(type(weight)("fp8", *parts)).to(device)
    exact = torch.einsum("tgk,gnk->tgn", x.view(64, groups, columns).double(), truth)
    bound = 2.0**-17 * max(1.0, columns / 4096)
    assert relative_l2(layer(x).view(64, groups, rows), exact) <= bound


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 8, 300])
def test_captured(shape, tokens):
    layer, x = case(shape, "cuda", tokens)
    expected, out = layer(x), torch.empty(tokens, layer.out_features, device="cuda")
    layer(x, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(x, out=out)
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert_same_bits(out, expected)


@pytest.mark.parametrize("numerics", ["a16", "a8"])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_gate_and_up_in_two_launches(format, numerics, device):
    """EXACTMOE_GATE_UP; where a backend has no second way, it is the same call twice."""
    hidden, inner = (4096, 2048) if device == "cuda" else (128, 128)
    rng = generator(device, 3)
    sizes = ((inner, hidden), (inner, hidden), (hidden, inner))
    bank = ExpertBank(*(packed(rng, format, 8, *size) for size in sizes))
    wide = Numerics(activation=numerics, slot="f32", output="f32")
    backend = "triton" if device == "cuda" else "auto"
    layer = layer_of(bank, 4, backend, numerics=wide, swiglu_limit=10.0)
    for tokens in (1, 3, 16, 70):
        x = torch.randn(tokens, hidden, generator=rng, device=device).bfloat16()
        ids = torch.randint(0, 8, (tokens, 4), generator=rng, device=device).int()
        weights = torch.rand(tokens, 4, generator=rng, device=device)
        one = layer.experts(x, ids, weights)
        with env.forced("EXACTMOE_GATE_UP", "two"):
            assert_same_bits(layer.experts(x, ids, weights), one)


def test_a_native_model(device, tmp_path):
    """The demo DeepSeek-V4 with attention and shared experts in FP8, as the published ones are."""
    from exactmoe.hf import linears, load_model

    source, folder = Path(__file__).resolve().parents[2] / "demo" / "deepseek_v4", tmp_path / "m"
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    fp8_parts("deepseek_v4")(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    card = "cuda:0" if device == "cuda" else device
    model = load_model(folder, cards=(card,), progress=False)
    found = linears(model)
    assert len(found) == 5 * 5 + len([n for n, _, _ in found if "indexer" in n])
    assert {layer.device.type for _, _, layer in found} == {device}
    ids = torch.randint(1, 2000, (1, 70), generator=generator("cpu", 4)).to(device)
    for _, module, layer in found:
        x = torch.randn(70, layer.in_features, generator=generator(device, 5), device=device)
        shaped = x.bfloat16().view(70, layer.groups, -1) if layer.groups > 1 else x.bfloat16()
        rows = torch.cat([module(shaped[t : t + 7]) for t in range(0, 70, 7)])
        assert_same_bits(module(shaped), rows)
    text = model.generate(ids, max_new_tokens=6, do_sample=False)
    assert text.equal(model.generate(ids, max_new_tokens=6, do_sample=False))
    model.save_pretrained(tmp_path / "saved")
    assert_same_tensors(tensors_in(tmp_path / "saved"), tensors_in(folder))
