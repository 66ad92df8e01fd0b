"""A native DeepSeek-V4 checkpoint as it is published: FP8 attention and shared experts with E8M0
scales, MXFP4 experts. And GLM's FP8 attention.
"""

import copy
import io
import re

import pytest
import torch
from packaging.version import Version

from exactmoe import DenseLinear
from exactmoe.errors import CheckpointError, Unsupported
from exactmoe.formats import dequantize
from exactmoe.hf import adapter, blocks, explain, linears, load_model
from exactmoe.hf.linears import attach_linears, in_groups
from layers import assert_same_bits, true_values
from native_checkpoints import ATTENTION, SUFFIX, fp8_parts, values
from paths import random_weight
from saved_bytes import assert_saves_as, tensors_in


@pytest.fixture(scope="module")
def model(native):
    return load_model(native, progress=False)


def only(family):
    return pytest.mark.parametrize("family", [family], indirect=True)


def bits_of_every_linear(model, rng):
    for name, module, layer in linears(model):
        x = torch.randn(5, module.in_features * layer.groups, generator=rng).bfloat16()
        yield name, module, layer, x


def test_every_fp8_weight_runs_here(model, family, native):
    """The names in the model are transformers', the classes too; nothing else is replaced."""
    found = {re.sub(r".*layers\.\d+\.", "", name) for name, _, _ in linears(model)}
    expected = {
        "deepseek_v4": {
            "self_attn.q_a_proj",
            "self_attn.q_b_proj",
            "self_attn.kv_proj",
            "self_attn.o_a_proj",
            "self_attn.o_b_proj",
            "self_attn.compressor.indexer.q_b_proj",
        },
        "glm5_next": {
            f"self_attn.{name}"
            for name in (
                "q_a_proj",
                "q_b_proj",
                "kv_a_proj_with_mqa",
                "kv_b_proj",
                "o_proj",
                "q_proj",
                "k_proj",
                "v_proj",
            )
        },
    }[family]
    assert found == expected
    tensors = tensors_in(native)
    assert len(linears(model)) == len([n for n in tensors if re.search(ATTENTION[family], n)])
    for _, module, layer in linears(model):
        assert layer.weight.format == "fp8" and isinstance(module, torch.nn.Linear)
        assert module.weight.dtype == torch.float8_e4m3fn
        assert layer.weight.codes.data_ptr() == module.weight.data_ptr()
        grouped = type(module).__name__ == "DeepseekV4GroupedLinear"
        assert layer.groups == (2 if grouped else 1)
    for _, _, layer in blocks(model):
        if getattr(layer, "shared", None) is not None:
            assert layer.shared.bank.formats == ("fp8", "fp8", "fp8")


def test_weights_stay_packed_in_memory(model, native, family):
    tensors = tensors_in(native)
    names = [n for n in tensors if re.search(ATTENTION[family], n)]
    in_memory = sum(module.weight.untyped_storage().nbytes() for _, module, _ in linears(model))
    assert in_memory == sum(tensors[name].nbytes for name in names)


def test_a_layer_is_its_dequantised_dot(model, native, family, rng):
    """Against float64 over the values of the files, each linear by its published name."""
    tensors = tensors_in(native)
    origin = model.hf_quantizer.origin
    for name, module, layer, x in bits_of_every_linear(model, rng):
        weight = values(tensors, f"{origin.linears[name].sources[0].base}.weight", SUFFIX[family])
        rows, groups = weight.shape[0] // layer.groups, layer.groups
        parts = x.view(5, groups, -1).double()
        truth = torch.einsum("tgk,gnk->tgn", parts, weight.view(groups, rows, -1))
        shaped = x.view(5, groups, -1) if groups > 1 else x
        found = module(shaped)
        assert found.shape == (5, groups, rows) if groups > 1 else (5, rows)
        error = (found.double().view(5, groups, rows) - truth).norm() / truth.norm()
        assert float(error) < 2.0**-8, name


def test_a_layer_is_one_bit_pattern_at_every_width(model, rng):
    for _, module, layer, x in bits_of_every_linear(model, rng):
        shaped = x.view(5, layer.groups, -1) if layer.groups > 1 else x
        rows = torch.cat([module(shaped[t : t + 1]) for t in range(5)])
        assert_same_bits(module(shaped), rows)
        assert_same_bits(module(shaped[None])[0], rows)
        again = DenseLinear(layer.weight, backend="reference")(x)
        assert_same_bits(again.view(rows.shape), rows)


def test_generates(model, token_ids):
    first = model.generate(token_ids, max_new_tokens=6, do_sample=False)
    assert first.shape == (1, token_ids.shape[1] + 6)
    assert first.equal(model.generate(token_ids, max_new_tokens=6, do_sample=False))


def test_logits_are_near_those_of_the_dequantised_model(family, native, sources, rng):
    """As near to a float32 model over the values of the files as transformers' bf16 one is, in the
    median over tokens: a token whose router chooses other experts is far in both.
    """
    model = load_model(native, numerics="a16", progress=False)
    ids = torch.randint(1, 249, (2, 64), generator=rng)
    logits = [model(input_ids=ids).logits]
    for dtype in (torch.bfloat16, torch.float32):
        stock = adapter.auto_class(model.config).from_pretrained(sources[family], dtype=dtype)
        if dtype == torch.bfloat16:
            adapter.keep_rows_bf16(stock)
        copy_values(model, stock, tensors_in(native), SUFFIX[family])
        logits.append(stock(input_ids=ids).logits)
    ours, theirs, truth = (found.detach().double().flatten(0, 1) for found in logits)
    near, stocks = ((found - truth).norm(dim=-1).median() for found in (ours, theirs))
    assert near <= 2 * stocks


@torch.no_grad()
def copy_values(model, stock, tensors, suffix):
    """The values that a packed model stands for, into a stock one."""
    for name, _, _ in linears(model):
        base = model.hf_quantizer.origin.linears[name].sources[0].base
        stock.get_submodule(name).weight.copy_(values(tensors, f"{base}.weight", suffix))
    stock_blocks = [layer.mlp for layer in adapter.decoder_layers(stock)]
    for (_, _, ours), block in zip(blocks(model), stock_blocks, strict=True):
        dense = getattr(ours, "shared", None) or ours
        linear = getattr(block, "shared_experts", block)
        for part in ("gate", "up", "down"):
            value = dequantize(dense.bank.packed(part))[0]
            getattr(linear, f"{part}_proj").weight.copy_(value)
        if hasattr(block, "experts"):
            gate, up, down = (dequantize(ours.bank.packed(p)) for p in ("gate", "up", "down"))
            block.experts.gate_up_proj.copy_(torch.cat([gate, up], 1))
            block.experts.down_proj.copy_(down)


def test_saves_the_bytes_of_the_files(model, native, tmp_path):
    assert_saves_as(model, native, tmp_path / "saved")


def test_a_saved_checkpoint_loads_again(model, native, token_ids, tmp_path):
    model.save_pretrained(tmp_path / "saved")
    again = load_model(tmp_path / "saved", progress=False)
    assert_same_bits(again(input_ids=token_ids).logits, model(input_ids=token_ids).logits)


def test_it_copies_and_pickles_and_keeps_its_types(model, token_ids):
    expected = model(input_ids=token_ids).logits
    copied = copy.deepcopy(model).to(torch.float16)
    assert {m.weight.dtype for _, m, _ in linears(copied)} == {torch.float8_e4m3fn}
    assert {m.weight_scale.dtype for _, m, _ in linears(copied)} == {torch.float32}
    buffer = io.BytesIO()
    torch.save(linears(model)[0][1], buffer)
    buffer.seek(0)
    module, layer = torch.load(buffer, weights_only=False), linears(model)[0][2]
    x = torch.ones(2, layer.in_features).bfloat16()
    assert_same_bits(module(x), layer(x))
    assert_same_bits(copy.deepcopy(model)(input_ids=token_ids).logits, expected)


def test_explain_lists_them(model, family):
    text = explain(model)
    kinds = {
        "deepseek_v4": r"layers 0-3, self_attn\.o_a_proj: fp8 \[32, 64\] in 2 groups",
        "glm5_next": r"self_attn\.q_a_proj: fp8 \[32, 64\]",
    }
    assert re.search(kinds[family], text), text
    assert f"{len(linears(model))} linear layers outside the MLP blocks" in text


@only("deepseek_v4")
@pytest.mark.parametrize("suffix", ["weight_scale_inv", "weight_scale", "scale"])
def test_scales_of_every_publisher(write, suffix, family, token_ids, tmp_path):
    folder = write(change=fp8_parts(family, suffix))
    model = load_model(folder, progress=False)
    assert len(linears(model)) == 22
    assert torch.isfinite(model(input_ids=token_ids).logits).all()
    assert_saves_as(model, folder, tmp_path / "saved")


@only("deepseek_v4")
def test_scale_bytes_0_and_254(write, family, tmp_path):
    """E8M0 0 is 2^-127, a float32 subnormal; both come back as bytes (field fault A4)."""

    def change(tensors):
        fp8_parts(family)(tensors)
        for layer, byte in ((1, 0), (2, 254)):
            scale = torch.full((1, 1), byte, dtype=torch.uint8).view(torch.float8_e8m0fnu)
            tensors[f"layers.{layer}.attn.wq_a.scale"] = scale

    folder = write(change=change)
    model = load_model(folder, progress=False)
    found = {name: layer.weight.scales for name, _, layer in linears(model)}
    assert float(found["model.layers.1.self_attn.q_a_proj"][0, 0, 0]) == 2.0**-127
    assert float(found["model.layers.2.self_attn.q_a_proj"][0, 0, 0]) == 2.0**127
    assert_saves_as(model, folder, tmp_path / "saved")


def test_missing_scales_are_named(write, family):
    def change(tensors):
        fp8_parts(family)(tensors)
        name = next(n for n in sorted(tensors) if re.search(ATTENTION[family], n))
        del tensors[name.removesuffix("weight") + SUFFIX[family]]

    with pytest.raises(
        CheckpointError, match=r"weight \(F8_E4M3 .* has no scales beside it; known"
    ):
        load_model(write(change=change), progress=False)


@only("deepseek_v4")
@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        (
            "scale",
            torch.full((1, 1), 255, dtype=torch.uint8),
            r"wq_a\.scale: block scale nan at ex",
        ),
        (
            "weight",
            torch.full((32, 128), 0x7F, dtype=torch.uint8),
            r"wq_a\.weight: code 0x7F \(NaN",
        ),
    ],
)
def test_refused_bytes_are_named(write, family, name, value, said):
    dtype = torch.float8_e8m0fnu if name == "scale" else torch.float8_e4m3fn

    def change(tensors):
        fp8_parts(family)(tensors)
        tensors[f"layers.1.attn.wq_a.{name}"] = value.view(dtype)

    with pytest.raises(CheckpointError, match=rf"safetensors: layers\.1\.attn\.{said}"):
        load_model(write(change=change), progress=False)


@only("deepseek_v4")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda t: t.update({"layers.1.attn.wq_a.scale": torch.ones(2, 1)}),
            r"wq_a\.scale F32 beside it; known: FP8 128x128",
        ),
        (
            lambda t: t.update(
                {"layers.1.attn.wq_a.scale": torch.ones(2, 1).to(torch.float8_e8m0fnu)}
            ),
            r"wq_a\.scale \(F8_E8M0 \[2, 1\]\): FP8 128x128 with scale asks for \[1, 1\]",
        ),
        (
            lambda t: t.update({"embed.weight": t["embed.weight"].to(torch.float8_e4m3fn)}),
            r"embed\.weight \(F8_E4M3 \[256, 128\]\) has no scales beside it",
        ),
        (
            lambda t: t.update({"layers.1.attn.wq_a.weight": torch.zeros(32, 128).half()}),
            r"wq_a\.\w+ \(F.* is left to transformers; allowed there: BF16, F32, I32, I64, and li",
        ),
    ],
    ids=["float32 in scale", "shape", "embedding", "half"],
)
def test_other_layouts_are_refused(write, family, change, said):
    def both(tensors):
        fp8_parts(family)(tensors)
        change(tensors)

    with pytest.raises((Unsupported, CheckpointError), match=said):
        load_model(write(change=both), progress=False)


class Doubled(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (torch.nn.Embedding(4, 16), "Embedding has an FP8 weight; allowed: nn.Linear"),
        (Doubled(16, 16, bias=False), "Doubled has an FP8 weight; allowed: nn.Linear"),
        (torch.nn.Linear(16, 16), "Linear has an FP8 weight and a bias; allowed: no bias"),
    ],
)
def test_other_modules_are_refused(module, said):
    with pytest.raises(Unsupported, match=said):
        attach_linears(torch.nn.Sequential(module), {"0": None}, None)


@pytest.mark.parametrize("rows", [16, 64, 128, 256])
def test_groups_take_their_own_scales(rows, rng):
    weight = random_weight(rng, "fp8", 1, 4 * rows, 272)
    found, whole = in_groups(weight, 4), true_values(weight)[0]
    assert true_values(found).flatten(0, 1).equal(whole)


def test_groups_across_a_block_are_refused(rng):
    weight = random_weight(rng, "fp8", 1, 4 * 96, 272)
    with pytest.raises(Unsupported, match="4 groups of 96 rows in blocks of 128; allowed: rows"):
        in_groups(weight, 4)


def test_gradients_are_refused(model):
    _, module, layer = linears(model)[0]
    x = torch.ones(1, layer.in_features, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(Unsupported, match="needs gradients"):
        module(x)


def test_other_rows_are_refused(model):
    _, module, layer = linears(model)[0]
    with pytest.raises(Unsupported, match="x is torch.float32; allowed: torch.bfloat16"):
        module(torch.ones(1, layer.in_features))


def test_saving_a_changed_weight_is_refused(model, tmp_path):
    changed = copy.deepcopy(model)
    name, module, _ = linears(changed)[0]
    module.weight = torch.nn.Parameter(torch.zeros(module.weight.shape).bfloat16(), False)
    with pytest.raises(Unsupported, match="weight_scale is torch.float32; allowed: torch.float8"):
        module(torch.ones(1, module.in_features).bfloat16())
    del module.weight_scale
    with pytest.raises(Unsupported, match="became torch.bfloat16 without scales"):
        module(torch.ones(1, module.in_features).bfloat16())
    with pytest.raises(CheckpointError, match=f"{re.escape(name)} became torch.bfloat16"):
        changed.save_pretrained(tmp_path)


@pytest.mark.skipif(
    Version(torch.__version__) < Version("2.13"), reason="an older torch is refused under compile"
)
def test_a_linear_module_compiles_to_one_operation(model, rng):
    torch._dynamo.reset()
    for name, module, layer, x in list(bits_of_every_linear(model, rng))[:4]:
        shaped = x.view(5, layer.groups, -1) if layer.groups > 1 else x
        compiled = torch.compile(module.forward, fullgraph=True, backend="aot_eager")
        assert_same_bits(compiled(shaped), module(shaped), name)
    torch._dynamo.reset()
