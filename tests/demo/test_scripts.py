"""The demo's scripts: corpus split, tables, packing, and the judge of continuations."""

import continuations
import corpus
import export
import linear_attention
import models
import numpy as np
import pytest
import torch

from exactmoe.formats import dequantize, quantize_mxfp4, quantize_nvfp4


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def f(x):\n    return x\n", "accepted"),
        ("def f(x):\n    return x\nthis line is cut: 'and not read", "accepted"),
        ("def f(x):\n    return (x,\n", "incomplete"),
        ('def f(x):\n    """Never\n    closed.\n', "incomplete"),
        ("def f(x):\n        return x\n    return x\n", "refused"),
        ("x = 'open\n", "refused"),
    ],
)
def test_outcome(text, expected):
    assert continuations.outcome(text) == expected


def test_heldout_modules_and_their_tests_are_not_trained_on(tmp_path):
    for name in ("heapq", "test_heapq", "ast", "test_ast"):
        (tmp_path / f"{name}.py").write_text(f"{name} = 1\n")
    (tmp_path / "broken.py").write_text("def (:\n")
    kept = [path.stem for path in corpus.training_files(tmp_path)]
    assert kept == ["ast", "test_ast"]


def test_repository_holds_every_heldout_module():
    assert {f"{name}.py.txt" for name in corpus.HELDOUT_MODULES} == set(corpus.heldout_texts())


def test_balanced_table():
    counts = np.random.default_rng(1).zipf(1.3, 2048).clip(max=20_000)
    table = models.balanced_table(counts, num_experts=24, top_k=4).numpy()
    assert all(len(set(row)) == 4 for row in table)
    load = np.bincount(table.ravel(), weights=counts.repeat(4), minlength=24)
    assert load.max() < 1.2 * load.mean()


@pytest.mark.parametrize(
    ("pack", "name", "quantizer"),
    [
        (export.modelopt, "layers.1.mlp.experts.3.gate_proj.weight", quantize_nvfp4),
        (export.native, "model.layers.1.ffn.experts.3.w1.weight", quantize_mxfp4),
    ],
)
def test_packed_bytes_are_the_quantisers(pack, name, quantizer, rng):
    weight = torch.randn(32, 64, generator=rng).bfloat16()
    tensors = pack(name, weight)
    packed = quantizer(weight[None])
    codes, scales = (tensor.view(torch.uint8) for tensor in list(tensors.values())[:2])
    assert torch.equal(codes, packed.codes[0])
    assert torch.equal(scales, packed.scales[0])
    error = (dequantize(packed)[0].float() - weight.float()).norm() / weight.float().norm()
    assert 0.01 < error < 0.2


def test_other_tensors_are_copied(rng):
    weight = torch.randn(8, 8, generator=rng)
    name = "model.layers.1.ffn.shared_experts.w1.weight"
    assert torch.equal(export.native(name, weight)[name.removeprefix("model.")], weight)
    name = "model.layers.1.mlp.shared_experts.gate_proj.weight"
    assert torch.equal(export.modelopt(name, weight)[name], weight)
    assert list(export.native("model.embed_tokens.weight", weight)) == ["embed.weight"]


def test_training_form_of_linear_attention(rng):
    shape = (2, 64, 3, 16)
    query, key, value, gate = (torch.randn(shape, generator=rng) for _ in range(4))
    gate, beta = -5 * torch.sigmoid(gate - 3), torch.rand(shape[:3], generator=rng)
    call = {"g": gate, "beta": beta, "initial_state": None, "output_final_state": False}
    stock = linear_attention.modeling_glm5_next.chunk_kimi_delta_attention
    expected = stock(query, key, value, **call, use_qk_l2norm_in_kernel=True)[0]
    found = linear_attention.solved_chunks(query, key, value, **call)[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="multiple of 32"):
        linear_attention.solved_chunks(query[:, :5], key, value, **call)
